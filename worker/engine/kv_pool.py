"""The tensors that hold keys and values, one slot for each token, and how many there are.

A slot is page * page_size + offset; who owns which page is the scheduler's business.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.models.config import ModelConfig, ModelError

# Of the memory that is free when the engine starts.
DEFAULT_MEMORY_FRACTION = 0.25
# More than this helps no CPU: it could not fill it with prompts in an hour.
_LARGEST_AUTO_BYTES = 8 << 30
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


class KVPool:
    """For each layer a tensor [num_slots, 2, num_kv_heads, head_dim], keys then values.

    Filled with zeros: memory that nobody has written must still be finite, because a
    masked score of zero times not-a-number is not a number.
    """

    def __init__(self, config: ModelConfig, *, num_slots: int, dtype: torch.dtype) -> None:
        shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
        self.layers: list[Tensor] = [
            _untouched_zeros(shape, dtype) for _ in range(config.num_layers)
        ]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory is the kernel's until it is written.

    torch.zeros writes them: for a pool of 5 GiB that took seconds of every start, and all
    of that memory, however few tokens were ever cached.
    """
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """What one slot takes in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def choose_num_pages(
    page_bytes: int, *, page_size: int, max_context: int, max_rows: int, memory_bytes: int
) -> int:
    """Pages that fit in the memory, but no more than all rows could fill.

    Raises ModelError where not even one request of `max_context` tokens fits.
    """
    pages_per_row = pages_for(max_context, page_size)
    num_pages = min(max_rows * pages_per_row, memory_bytes // page_bytes)
    if num_pages < pages_per_row:
        raise ModelError(
            f"a KV cache for max_context {max_context} takes {_mib(pages_per_row * page_bytes)}, "
            f"and {_mib(memory_bytes)} are allotted to it; lower max_context or raise "
            "memory_fraction"
        )
    return num_pages


def auto_memory_bytes(fraction: float | None) -> int:
    """The KV cache's share of the memory that is free now."""
    share = int(available_memory_bytes() * (fraction or DEFAULT_MEMORY_FRACTION))
    return share if fraction else min(share, _LARGEST_AUTO_BYTES)


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def available_memory_bytes() -> int:
    """Free memory of this machine, or of the container where that is less."""
    free = [_meminfo_available()]
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None:
            free.append(max(0, limit - used))
    return min(free)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ModelError("/proc/meminfo does not say what memory is available; set kv_pages")


def _read_number(path: str) -> int | None:
    """None where there is no such file or no limit in it."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
