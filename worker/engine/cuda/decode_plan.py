"""How the cached tokens of decode rows are cut into chunks, on the device.

The cut reads the lengths where they lie, so a CUDA graph of a decode step stays valid for any.
"""

import torch
import triton
import triton.language as tl

# Words of a chunk's line: batch index (-1: no such chunk), row of the page table, length of
# the row, begin and end of the chunk, the row's first chunk and number of chunks.
ITEM_WORDS = 8
# Chunks are cut at multiples of this many tokens.
TILE = 64
# Programs of attention that a multiprocessor works on at once, by their registers.
_PROGRAMS_EACH = 8
# Chunks shorter than this cost more than they gain.
_SHORT = 256


def programs_at_once(device: torch.device) -> int:
    """How many programs of decode attention the device holds; an H200's for the interpreter."""
    if device.type != "cuda":
        return 132 * _PROGRAMS_EACH
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_EACH


def most_chunks(batch: int, wave: int) -> int:
    """How many chunks a batch is cut into at most, whatever its lengths.

    `wave` of them are worked on at once.
    """
    limit = wave * max(2, -(-batch // wave))
    return max(limit, batch + limit // 4)


def plan_chunks(
    items: torch.Tensor, rows: torch.Tensor, cached_lens: torch.Tensor, *, wave: int
) -> None:
    """Writes the chunks of rows and cached_lens, [batch] int32, to items [>= most, ITEM_WORDS]."""
    batch = len(cached_lens)
    block = triton.next_power_of_2(batch)
    _plan_kernel[(1,)](
        items,
        rows,
        cached_lens,
        batch,
        wave,
        most_chunks(batch, wave),
        BLOCK_B=block,
        # A table of rows by rows, as much of it as the registers hold.
        BLOCK_J=max(1, min(block, 4096 // block)),
        ITEM_WORDS=ITEM_WORDS,
        TILE=TILE,
        SHORT=_SHORT,
        num_warps=4,
    )


@triton.jit
def _cut(lens, exists, chunk, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of chunks and their size for rows of these lengths."""
    # A row without cached tokens still has one chunk, which holds its new token.
    counts = tl.where(exists, tl.maximum(tl.cdiv(lens, chunk), 1), 0)
    # A row's chunks are of one size, so that none ends long after the others.
    return counts, tl.cdiv(tl.cdiv(lens, tl.maximum(counts, 1)), TILE) * TILE


@triton.jit
def _choose_chunk(lens, exists, limit, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least size of chunk, of sixteen, of which there are at most `limit`."""
    least = tl.maximum(tl.cdiv(tl.sum(lens, 0), limit), 1)
    # From one to four times the least.
    i = tl.arange(0, 16)
    sizes = tl.cdiv(least * (8 + i + i * i // 25), 8 * TILE) * TILE
    counts, _ = _cut(lens[:, None], exists[:, None], sizes[None, :], TILE)
    # If none will do, the largest gives no more than `most_chunks`. Were it larger still, a
    # long row among many short ones would take longer than all of them together.
    return tl.min(tl.where(tl.sum(counts, 0) <= limit, sizes, tl.max(sizes, 0)), 0)


@triton.jit(do_not_specialize=["batch", "wave", "most"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    items,
    rows,
    cached_lens,
    batch,
    wave,
    most,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
):
    b = tl.arange(0, BLOCK_B)
    mask = b < batch
    lens = tl.load(cached_lens + b, mask=mask, other=0)
    row = tl.load(rows + b, mask=mask, other=0)
    # Whole waves: one chunk more than a wave holds, and most of the device waits for it. (48
    # rows of 1430 tokens: 140 chunks of a wave of 132 take 2.5 ms a step, 240 take 2.1.)
    is_short = (tl.sum(lens, 0) < 2 * wave * SHORT) & (batch <= wave)
    waves = tl.where(is_short, 1, tl.maximum(2, tl.cdiv(batch, wave)))
    chunk = _choose_chunk(lens, mask, waves * wave, TILE)
    counts, size = _cut(lens, mask, chunk, TILE)
    # Longest chunks first, so that those which end last are short: 2 to 7 % of attention.
    first = tl.zeros([BLOCK_B], tl.int32)
    for start in range(0, batch, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        others = tl.load(cached_lens + j, mask=j < batch, other=0)
        their_counts, their_size = _cut(others, j < batch, chunk, TILE)
        precedes = their_size[None, :] > size[:, None]
        precedes |= (their_size[None, :] == size[:, None]) & (j[None, :] < b[:, None])
        first += tl.sum(tl.where(precedes, their_counts[None, :], 0), 1)
    for i in range(tl.max(counts, 0)):
        line = items + (first + i) * ITEM_WORDS
        exists = i < counts
        tl.store(line, b, mask=exists)
        tl.store(line + 1, row, mask=exists)
        tl.store(line + 2, lens, mask=exists)
        tl.store(line + 3, tl.minimum(i * size, lens), mask=exists)
        tl.store(line + 4, tl.minimum((i + 1) * size, lens), mask=exists)
        tl.store(line + 5, first, mask=exists)
        tl.store(line + 6, counts, mask=exists)
    unused = tl.sum(counts, 0) + b
    for start in range(0, most, BLOCK_B):
        tl.store(items + (unused + start) * ITEM_WORDS, -1, mask=unused + start < most)
