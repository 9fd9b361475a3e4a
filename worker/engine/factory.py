"""The only file that knows the backends. Imports each only when it is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from worker.checkpoint.tokenizer import TOKENIZER, bundle_of_folder, eos_of_bundle
from worker.config import WorkerConfig
from worker.engine.echo import EchoEngine
from worker.messages import ModelInfo, TokenizerBundle
from worker.models.config import ModelError
from worker.step import Engine, EngineInfo

# Backends and checkpoint readers bring torch with them: seconds and hundreds of MB that an
# echo engine over a bare tokenizer does not need.
# ruff: noqa: PLC0415

# Of an echo engine whose model says none, and how many of them its pages hold: its KV is
# one int32 a token.
_ECHO_CONTEXT = 8192
_ECHO_CONTEXTS = 64

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A running engine and what it serves; whoever opened it closes the engine."""

    engine: Engine
    model: ModelInfo
    tokenizer: TokenizerBundle


def open_engine(
    config: WorkerConfig, environment: Mapping[str, str], progress: Progress
) -> OpenedEngine:
    """Opens the model and the backend that the settings name. Raises ModelError."""
    match config.engine:
        case "echo":
            return _open_echo(config, environment, progress)
        case "cpu" | None:
            return _open_cpu(config, environment, progress)
        case "cuda":
            raise ModelError("the cuda engine is not built in this version; use --engine cpu")


@dataclass(frozen=True, slots=True)
class _Source:
    """What of a checkpoint the echo engine needs."""

    name: str
    tokenizer: TokenizerBundle
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int


def _open_echo(
    config: WorkerConfig, environment: Mapping[str, str], progress: Progress
) -> OpenedEngine:
    source = _read_source(config, environment, progress)
    assert config.max_running is not None
    max_context = config.max_context or source.max_context
    pages_per_context = -(-max_context // config.page_size)
    info = EngineInfo(
        num_pages=config.kv_pages or pages_per_context * min(config.max_running, _ECHO_CONTEXTS),
        page_size=config.page_size,
        max_rows=config.max_running,
        max_context=max_context,
        vocab_size=source.vocab_size,
    )
    if not source.eos_token_ids:
        raise ModelError(f"{config.model} names no eos token, with which an echo ends")
    engine = EchoEngine(
        info, eos_token_id=source.eos_token_ids[0], step_s=config.echo_step_ms / 1000
    )
    model = ModelInfo(
        name=config.served_model_name or source.name,
        architecture="echo",
        dtype="int32",
        device="cpu",
        eos_token_ids=source.eos_token_ids,
        overlap_scheduling=config.overlap,
    )
    return OpenedEngine(engine, model, source.tokenizer)


def _read_source(
    config: WorkerConfig, environment: Mapping[str, str], progress: Progress
) -> _Source:
    folder = Path(config.model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        return _read_tokenizer_folder(folder)
    from worker.checkpoint.open import default_cache_dir, open_checkpoint

    checkpoint = open_checkpoint(
        config.model,
        cache_dir=default_cache_dir(environment),
        progress=progress,
        dummy_weights=config.dummy_weights,
    )
    return _Source(
        name=checkpoint.name,
        tokenizer=checkpoint.tokenizer(progress),
        eos_token_ids=checkpoint.eos_token_ids,
        vocab_size=checkpoint.config.vocab_size,
        max_context=checkpoint.config.max_context,
    )


def _read_tokenizer_folder(folder: Path) -> _Source:
    """A folder that holds a tokenizer alone."""
    bundle = bundle_of_folder(folder)
    if TOKENIZER not in bundle.files:
        raise ModelError(f"{folder} holds neither a config.json nor a {TOKENIZER}")
    tokenizer = Tokenizer.from_buffer(bundle.files[TOKENIZER])
    return _Source(
        name=folder.resolve().name,
        tokenizer=bundle,
        eos_token_ids=tuple(eos_of_bundle(bundle)),
        vocab_size=tokenizer.get_vocab_size(),
        max_context=_ECHO_CONTEXT,
    )


def _open_cpu(
    config: WorkerConfig, environment: Mapping[str, str], progress: Progress
) -> OpenedEngine:
    import torch

    from worker.checkpoint.open import default_cache_dir, open_checkpoint
    from worker.engine.cpu import CpuEngineConfig, open_cpu_engine

    checkpoint = open_checkpoint(
        config.model,
        cache_dir=default_cache_dir(environment),
        progress=progress,
        dummy_weights=config.dummy_weights,
    )
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    assert config.max_running is not None
    sizes = CpuEngineConfig(
        page_size=config.page_size,
        num_pages=config.kv_pages,
        memory_fraction=config.memory_fraction,
        max_rows=config.max_running,
        max_context=config.max_context,
        threads=config.threads,
    )
    return OpenedEngine(
        engine=open_cpu_engine(checkpoint, sizes, dtype=dtype, progress=progress),
        model=ModelInfo(
            name=config.served_model_name or checkpoint.name,
            architecture=checkpoint.config.architecture,
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            eos_token_ids=checkpoint.eos_token_ids,
            overlap_scheduling=config.overlap,
        ),
        tokenizer=checkpoint.tokenizer(progress),
    )
