"""The only file that knows the backends. Imports each only when it is asked for."""

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from shared.cores import usable_cores
from worker.checkpoint.tokenizer import TOKENIZER, bundle_of_folder, eos_of_bundle
from worker.config import WorkerConfig
from worker.engine.echo import EchoEngine
from worker.engine.openmp import limit_spinning
from worker.messages import ModelInfo, TokenizerBundle
from worker.models.config import ModelError
from worker.step import Engine, EngineInfo
from worker.structured.contract import GrammarLibrary

if TYPE_CHECKING:
    from worker.checkpoint.source import Checkpoint

# Backends and checkpoint readers bring torch with them: seconds and hundreds of MB that an
# echo engine over a bare tokenizer does not need.
# ruff: noqa: PLC0415

# Of an echo engine whose model says none, and how many of them its pages hold: its KV is
# one int32 a token.
_ECHO_CONTEXT = 8192
_ECHO_CONTEXTS = 64

# 256 masks of a vocabulary of 152 k ids take 7 ms on one thread, so these hide behind any step.
_MOST_MASK_THREADS = 16

Progress = Callable[[str], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A running engine and what it serves; whoever opened it closes the engine."""

    engine: Engine
    model: ModelInfo
    tokenizer: TokenizerBundle
    # None where no structured output can be served.
    grammars: GrammarLibrary | None = None


def open_engine(
    config: WorkerConfig, environment: MutableMapping[str, str], progress: Progress
) -> OpenedEngine:
    """Opens the model and the backend that the settings name. Raises ModelError.

    May set in `environment`, the process's own, what libraries read when they are loaded.
    """
    match config.engine:
        case "echo":
            return _open_echo(config, environment, progress)
        case "cpu" | None:
            return _open_cpu(config, environment, progress)
        case "cuda":
            return _open_cuda(config, environment, progress)


@dataclass(frozen=True, slots=True)
class _Source:
    """What of a checkpoint the echo engine needs."""

    name: str
    tokenizer: TokenizerBundle
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int


def _open_echo(
    config: WorkerConfig, environment: MutableMapping[str, str], progress: Progress
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
    config: WorkerConfig, environment: MutableMapping[str, str], progress: Progress
) -> _Source:
    folder = Path(config.model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        return _read_tokenizer_folder(folder)
    checkpoint = _open_checkpoint(config, environment, progress)
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
    config: WorkerConfig, environment: MutableMapping[str, str], progress: Progress
) -> OpenedEngine:
    # libgomp reads it when torch is imported.
    limit_spinning(environment)
    with _needs_extra("worker"):
        import torch

        from worker.engine.cpu import CpuEngineConfig, open_cpu_engine

    checkpoint = _open_checkpoint(config, environment, progress)
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
    engine = open_cpu_engine(checkpoint, sizes, dtype=dtype, progress=progress)
    tokenizer = checkpoint.tokenizer(progress)
    return OpenedEngine(
        engine=engine,
        model=_model_info(config, checkpoint, dtype=config.dtype or "float32", device="cpu"),
        tokenizer=tokenizer,
        # The forward, which goes on meanwhile, has a thread on every core.
        grammars=_open_grammars(tokenizer, engine.info, checkpoint.eos_token_ids, threads=1),
    )


def _open_cuda(
    config: WorkerConfig, environment: MutableMapping[str, str], progress: Progress
) -> OpenedEngine:
    if config.dtype == "float32":
        raise ModelError("the cuda engine computes in bfloat16; leave --dtype or use --engine cpu")
    with _needs_extra("cuda"):
        import torch

        from worker.engine.cuda.open import CudaOptions, open_cuda_engine

    checkpoint = _open_checkpoint(config, environment, progress)
    assert config.max_running is not None and config.token_budget is not None
    options = CudaOptions(
        max_rows=config.max_running,
        token_budget=config.token_budget,
        page_size=config.page_size,
        max_context=config.max_context,
        kv_pages=config.kv_pages,
        memory_fraction=config.memory_fraction,
        graphs=config.cuda_graphs,
    )
    engine = open_cuda_engine(checkpoint, options, progress)
    tokenizer = checkpoint.tokenizer(progress)
    threads = min(_MOST_MASK_THREADS, max(1, usable_cores() - 1))
    return OpenedEngine(
        engine=engine,
        model=_model_info(
            config, checkpoint, dtype="bfloat16", device=torch.cuda.get_device_name()
        ),
        tokenizer=tokenizer,
        grammars=_open_grammars(tokenizer, engine.info, checkpoint.eos_token_ids, threads=threads),
    )


def _open_grammars(
    tokenizer: TokenizerBundle, info: EngineInfo, eos_token_ids: tuple[int, ...], *, threads: int
) -> GrammarLibrary | None:
    """None, and the log says why, for a model of which no output can be constrained."""
    with _needs_extra("worker"):
        from worker.structured.library import LLGuidance

    eos_ids = [token_id for token_id in eos_token_ids if token_id < info.vocab_size]
    if TOKENIZER not in tokenizer.files or not eos_ids:
        _log.info("no structured output: the model has no tokenizer, or no eos token")
        return None
    try:
        return LLGuidance(
            tokenizer.files[TOKENIZER].decode(),
            vocab_size=info.vocab_size,
            eos_token_ids=eos_ids,
            threads=threads,
        )
    except ValueError as error:
        _log.warning("no structured output: %s", error)
        return None


def _open_checkpoint(
    config: WorkerConfig, environment: MutableMapping[str, str], progress: Progress
) -> "Checkpoint":
    with _needs_extra("worker"):
        from worker.checkpoint.open import default_cache_dir, open_checkpoint

    return open_checkpoint(
        config.model,
        cache_dir=default_cache_dir(environment),
        progress=progress,
        dummy_weights=config.dummy_weights,
    )


def _model_info(
    config: WorkerConfig, checkpoint: "Checkpoint", *, dtype: str, device: str
) -> ModelInfo:
    return ModelInfo(
        name=config.served_model_name or checkpoint.name,
        architecture=checkpoint.config.architecture,
        dtype=dtype,
        device=device,
        eos_token_ids=checkpoint.eos_token_ids,
        overlap_scheduling=config.overlap,
    )


@contextmanager
def _needs_extra(name: str) -> Iterator[None]:
    """Turns a missing package into words on how to get it."""
    try:
        yield
    except ImportError as error:
        raise ModelError(f"{error}; install it with: pip install 'tandem[{name}]'") from error
