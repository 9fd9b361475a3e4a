"""From a checkpoint to a running engine: device, weights, memory, graphs."""

from dataclasses import dataclass

import torch

from worker.checkpoint.load import load_model
from worker.checkpoint.source import Checkpoint, Progress
from worker.engine.cuda.decode_attention import DecodeShape
from worker.engine.cuda.engine import CudaEngine, Memory
from worker.engine.cuda.graphs import graph_batch_sizes
from worker.engine.cuda.ops import CudaOps
from worker.engine.kv_pool import choose_num_pages, kv_bytes_per_token, pages_for
from worker.models.config import ModelConfig, ModelError
from worker.models.decoder import Decoder
from worker.step import EngineInfo

# Of what is free once weights, activations and graphs have theirs.
DEFAULT_MEMORY_FRACTION = 0.92
# Hopper: FlashInfer's fa3 kernels and bfloat16 products as they were measured.
_LEAST_CAPABILITY = (8, 0)
_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Settings of the engine; None is chosen from the model and the device's memory."""

    max_rows: int = 256
    token_budget: int = 16384
    page_size: int = 16
    max_context: int | None = None
    kv_pages: int | None = None
    memory_fraction: float | None = None
    # Decode steps are captured in CUDA graphs; without, each kernel is launched by the host.
    graphs: bool = True


def open_cuda_engine(
    checkpoint: Checkpoint, options: CudaOptions, progress: Progress
) -> CudaEngine:
    """The checkpoint's model, in bfloat16, on the current CUDA device. Raises ModelError."""
    device = _device(checkpoint.config)
    ops = CudaOps()
    try:
        model = load_model(
            checkpoint,
            ops,
            dtype=torch.bfloat16,
            device=device,
            progress=progress,
            max_context=options.max_context,
        )
        sizes = graph_batch_sizes(options.max_rows) if options.graphs else []
        info = _engine_info(model, ops, options, sizes, device, progress)
        memory = Memory(info, _shape(model.config, options), model.config.num_layers, device)
        return CudaEngine(model, ops, memory, graph_batch_sizes=sizes, progress=progress)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{checkpoint.name} does not fit on {_describe(device)}: {error}"
        ) from error


def _device(config: ModelConfig) -> torch.device:
    if not torch.cuda.is_available():
        raise ModelError("no usable CUDA device; use the cpu engine")
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise ModelError(f"{_describe(device)} has no bfloat16; use the cpu engine")
    if config.head_dim not in _HEAD_DIMS:
        raise ModelError(f"head_dim {config.head_dim} is not supported on CUDA, only {_HEAD_DIMS}")
    return device


def _engine_info(
    model: Decoder,
    ops: CudaOps,
    options: CudaOptions,
    graph_sizes: list[int],
    device: torch.device,
    progress: Progress,
) -> EngineInfo:
    """Sizes the KV pool by what activations and graphs are seen to take."""
    config = model.config
    info = EngineInfo(
        num_pages=pages_for(model.max_context, options.page_size),
        page_size=options.page_size,
        max_rows=options.max_rows,
        max_context=model.max_context,
        vocab_size=config.vocab_size,
    )
    page_bytes = kv_bytes_per_token(config, torch.bfloat16) * options.page_size
    num_pages = options.kv_pages
    if num_pages is None:
        activations = _activation_bytes(model, options, device)
        trial = Memory(info, _shape(config, options), config.num_layers, device)
        overhead = _overhead_bytes(model, ops, trial, graph_sizes)
        free = torch.cuda.mem_get_info(device)[0]
        fraction = options.memory_fraction or DEFAULT_MEMORY_FRACTION
        num_pages = choose_num_pages(
            page_bytes,
            page_size=options.page_size,
            max_context=model.max_context,
            max_rows=options.max_rows,
            memory_bytes=max(0, int((free - activations - overhead) * fraction)),
        )
        progress(
            f"{free >> 20} MiB free after weights: activations {activations >> 20}, "
            f"graphs and workspaces {overhead >> 20}, KV {num_pages * page_bytes >> 20} "
            f"({num_pages} pages of {options.page_size} tokens)"
        )
    return EngineInfo(
        num_pages=num_pages,
        page_size=options.page_size,
        max_rows=options.max_rows,
        max_context=model.max_context,
        vocab_size=config.vocab_size,
    )


def _activation_bytes(model: Decoder, options: CudaOptions, device: torch.device) -> int:
    """What the largest step takes beyond weights and KV, seen by running one."""
    num_tokens = options.token_budget

    def skip(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        # As much memory as real attention: rotated queries and the output.
        rotated, out = torch.empty_like(q), torch.zeros_like(q)
        del rotated
        return out.flatten(1)

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        hidden = model(tokens, tokens, skip)
        model.logits(hidden[: options.max_rows])
        del tokens, hidden
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return peak


def _overhead_bytes(model: Decoder, ops: CudaOps, trial: Memory, graph_sizes: list[int]) -> int:
    """What workspaces and graphs take, seen by building an engine with a small KV pool.

    Graphs share the memory of the largest; each has some of the driver's, taken as equal.
    """
    device = trial.device
    largest = graph_sizes[-1:]
    before = torch.cuda.mem_get_info(device)[0]
    engine = CudaEngine(model, ops, trial, graph_batch_sizes=largest, progress=lambda message: None)
    torch.cuda.empty_cache()
    taken = before - torch.cuda.mem_get_info(device)[0]
    engine.close()
    del engine
    torch.cuda.empty_cache()
    pages = (trial.info.num_pages + 1) * trial.info.page_size
    taken -= pages * kv_bytes_per_token(model.config, torch.bfloat16)
    return max(0, taken) + len(graph_sizes) * _GRAPH_BYTES


# The driver's share of one captured step of 300 kernels and its late draw, generously.
_GRAPH_BYTES = 16 << 20


def _shape(config: ModelConfig, options: CudaOptions) -> DecodeShape:
    return DecodeShape(
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=options.page_size,
    )


def _describe(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory >> 20} MiB)"
