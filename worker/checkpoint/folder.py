"""A folder of safetensors, as it is published on the hub."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.checkpoint.source import Progress, fill_from
from worker.checkpoint.tokenizer import bundle_of_folder, eos_of_bundle
from worker.messages import TokenizerBundle
from worker.models.config import Json, ModelConfig, ModelError, read_json
from worker.models.layers import Slots


class FolderCheckpoint:
    """config.json, *.safetensors and tokenizer files in one folder."""

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        """Reads the config. Raises ModelError."""
        self._folder = folder
        self._name = name or folder.resolve().name
        raw = read_config(folder / "config.json")
        self._config = ModelConfig.from_hf(raw)
        self._tokenizer = bundle_of_folder(folder)
        self._eos_token_ids = eos_of_folder(folder, raw, self._tokenizer)

    @property
    def name(self) -> str:
        return self._name

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def tokenizer(self, progress: Progress) -> TokenizerBundle:
        return self._tokenizer

    def fill(self, slots: Slots, progress: Progress) -> None:
        fill_from(self._tensors(), slots, progress, tied=self._config.tied_embeddings)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error

    def _files(self) -> list[Path]:
        """The files that the index names; without one, the only file there is."""
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index.read_bytes(), str(index)).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{index} has no weight_map")
            return [self._folder / str(name) for name in sorted(set(weight_map.values()))]
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{self._folder} holds no *.safetensors files")
        return files


def read_config(path: Path) -> Json:
    """Reads a config.json. Raises ModelError."""
    try:
        return read_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def eos_of_folder(folder: Path | None, config: Json, tokenizer: TokenizerBundle) -> tuple[int, ...]:
    """Union of the ids in the config, the folder's generation_config.json and the tokenizer."""
    ids = {*_as_ids(config.get("eos_token_id")), *eos_of_bundle(tokenizer)}
    generation = folder and folder / "generation_config.json"
    if generation and generation.is_file():
        ids.update(_as_ids(read_config(generation).get("eos_token_id")))
    return tuple(sorted(ids))


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
