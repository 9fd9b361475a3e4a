"""A row's lowest admitted logit, by search: one program a row, whatever the logits' type.

Keys are integers that order as logits do. A pass over a row weighs what lies above each of a
few thresholds and leaves the part of the range between two of them; the search is over when
one logit is left in it. With few tokens to keep, as top-k mostly has, most of the row cannot
be among them, and what can is gathered first: the k-th highest of the lanes' maxima is a
lower bound of the k-th highest logit.

All sums are in one order, so that equal rows have equal bounds.
"""

import torch
import triton
import triton.language as tl

from worker.engine.cuda.logits import has_filter, load_logits, ordered, value_of_ordered
from worker.engine.cuda.row_params import RowParams

# Lanes of a program, and logits that may be gathered.
MOST_CANDIDATES = 4096
# Thresholds of a pass.
_WAYS = 8


def search_bounds(
    logits: torch.Tensor,
    params: RowParams,
    candidates: torch.Tensor,
    bounds: torch.Tensor,
    vocab_size: int,
) -> None:
    """bounds[i] of logits [num_rows, vocab_size], float32 or int16 bits of bfloat16.

    `candidates` [≥ num_rows, MOST_CANDIDATES] float32 is space to work in.
    """
    _search_kernel[(logits.shape[0],)](
        logits,
        bounds,
        candidates,
        params.temperature,
        *params.filters,
        vocab_size,
        logits.stride(0),
        BLOCK=MOST_CANDIDATES,
        WAYS=_WAYS,
        num_warps=16,
    )


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    logits,
    bounds,
    candidates,
    temperature,
    top_k,
    top_p,
    min_p,
    is_greedy,
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0)
    if not has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
        tl.store(bounds + row, float("-inf"))
        return
    base = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    bottoms = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        exists = start + lane < vocab_size
        x = load_logits(base + start + lane, exists)
        tops = tl.maximum(tops, tl.where(exists, x, float("-inf")))
        bottoms = tl.minimum(bottoms, tl.where(exists & (x > float("-inf")), x, float("inf")))
    highest = tl.max(tops, 0)
    last = ordered(highest).to(tl.int64)
    bound = ordered(tl.minimum(tl.min(bottoms, 0), highest)).to(tl.int64)

    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    inverse_temperature = tl.minimum(1.0 / tl.load(temperature + row), 1e30)
    mine = candidates + row.to(tl.int64) * BLOCK
    num_candidates = BLOCK + 1
    if (k > 0) & (k < vocab_size) & (k <= BLOCK // 4):
        tl.store(mine + lane, tops)
        # What one thread writes others read.
        tl.debug_barrier()
        bound = _reach(mine, BLOCK, bound, last, highest, 0.0, k * 1.0, BLOCK, WAYS)
        tl.debug_barrier()
        num_candidates = _gather(mine, base, vocab_size, bound, BLOCK)
        tl.debug_barrier()
    if num_candidates <= BLOCK:
        bound = _filter(
            mine, num_candidates, bound, last, highest, inverse_temperature, k, p, BLOCK, WAYS
        )
    else:
        k = tl.where(k < vocab_size, k, 0)
        bound = _filter(
            base, vocab_size, bound, last, highest, inverse_temperature, k, p, BLOCK, WAYS
        )
    least = value_of_ordered(bound.to(tl.int32))
    fraction = tl.load(min_p + row)
    if fraction > 0.0:
        least = tl.maximum(least, highest + tl.log(fraction) / inverse_temperature)
    # The likeliest token is always admitted.
    tl.store(bounds + row, tl.where(least <= highest, least, highest))


@triton.jit
def _gather(mine, base, size, bound, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the logits from a key on to `mine`, as long as there is room; how many they are."""
    lane = tl.arange(0, BLOCK)
    first = bound.to(tl.int32)
    count = 0
    for start in range(0, size, BLOCK):
        exists = start + lane < size
        x = load_logits(base + start + lane, exists)
        is_candidate = (exists & (ordered(x) >= first)).to(tl.int32)
        more = tl.sum(is_candidate, 0)
        if more > 0:
            place = count + tl.cumsum(is_candidate, 0) - 1
            tl.store(mine + place, x, (is_candidate != 0) & (place < BLOCK))
        count += more
    return count


@triton.jit
def _filter(  # type: ignore[no-untyped-def]
    base,
    size,
    bound,
    last,
    highest,
    inverse_temperature,
    k,
    p,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The key that top-k (0: none) and then top-p leave, at least `bound`."""
    lane = tl.arange(0, BLOCK)
    if k > 0:
        # At this temperature every token weighs 1.
        bound = _reach(base, size, bound, last, highest, 0.0, k * 1.0, BLOCK, WAYS)
    if p < 1.0:
        kept = tl.zeros([BLOCK], tl.float32)
        first = bound.to(tl.int32)
        for start in range(0, size, BLOCK):
            x = load_logits(base + start + lane, start + lane < size)
            is_kept = (start + lane < size) & (ordered(x) >= first)
            kept += tl.where(is_kept, _weight(x, highest, inverse_temperature), 0.0)
        wanted = tl.sum(kept, 0) * p
        bound = _reach(base, size, bound, last, highest, inverse_temperature, wanted, BLOCK, WAYS)
    return bound


@triton.jit
def _reach(  # type: ignore[no-untyped-def]
    base,
    size,
    lo,
    hi,
    highest,
    inverse_temperature,
    target,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The highest key from which on logits weigh `target` or more, of keys lo … hi (int64).

    `lo` if there is none; any key that admits the same logits is as good.
    """
    # Loaded with an axis for the ways, or each load would be laid out anew to get one.
    lane = tl.arange(0, BLOCK)[None, :]
    by_value = True
    while lo < hi:
        thresholds = _thresholds(lo, hi, by_value, WAYS)
        keys = thresholds.to(tl.int32)[:, None]
        first, last = lo.to(tl.int32), hi.to(tl.int32)
        weights = tl.zeros([WAYS, BLOCK], tl.float32)
        least = tl.full([1, BLOCK], 0x7FFFFFFF, tl.int32)
        most = tl.full([1, BLOCK], -0x80000000, tl.int32)
        for start in range(0, size, BLOCK):
            exists = start + lane < size
            x = load_logits(base + start + lane, exists)
            key = ordered(x)
            weight = tl.where(exists, _weight(x, highest, inverse_temperature), 0.0)
            weights += tl.where(key >= keys, weight, 0.0)
            inside = exists & (key >= first) & (key <= last)
            least = tl.minimum(least, tl.where(inside, key, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(inside, key, -0x80000000))
        sums = tl.sum(weights, 1)
        is_reached = sums >= target
        above = tl.max(tl.where(is_reached, thresholds, lo), 0)
        below = tl.min(tl.where(is_reached, hi, thresholds - 1), 0)
        # The least that reaches: if it is no more than that, nothing above it does.
        is_exact = tl.min(tl.where(is_reached, sums, float("inf")), 0) == target
        # With one logit left, all keys up to it are alike.
        is_one = tl.min(least) >= tl.max(most)
        hi = tl.where(is_one, lo, tl.where(is_exact, above, below))
        lo = tl.where(is_one, lo, above)
        by_value = not by_value
    return lo


@triton.jit
def _thresholds(lo, hi, by_value, WAYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys [WAYS] in lo + 1 … hi, int64, rising.

    By value, logits fall evenly into the parts; by key, a part is a ninth of the keys
    whatever the values are, so that the search ends after twenty passes at the worst.
    """
    way = tl.arange(0, WAYS) + 1
    by_key = lo + way * ((hi - lo) // (WAYS + 1) + 1)
    low, high = value_of_ordered(lo.to(tl.int32)), value_of_ordered(hi.to(tl.int32))
    # Halves, for the difference of two float32 may be none.
    value = low + (high * 0.5 - low * 0.5) * (way * (2.0 / (WAYS + 1)))
    keys = tl.where(by_value, ordered(value).to(tl.int64), by_key)
    return tl.minimum(tl.maximum(keys, lo + 1), hi)


@triton.jit
def _weight(x, highest, inverse_temperature):  # type: ignore[no-untyped-def]
    """Unnormalised probability; 0 of -inf at any temperature."""
    # Finite, so that times 0 it is 0.
    below = tl.maximum(x - highest, -3e38)
    return tl.where(x > float("-inf"), tl.exp(below * inverse_temperature), 0.0)
