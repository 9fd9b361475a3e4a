"""The lowest logit that top-k, top-p and min-p admit, one for each row, exactly.

Filters keep tokens by value, so what they keep is all from some logit on. Two ways to it:
the model's bfloat16 logits take only 65536 values, which are counted; adjusted logits are
float32, and their bound is searched by key, an integer that orders as the logit does.
"""

import torch
import triton
import triton.language as tl

from worker.engine.cuda.row_params import RowParams

# Tokens of a counting program.
_SPLIT = 16384
_NUM_KEYS = 65536
# Thresholds that one pass of the search tries: a pass leaves an eighth of the range, so that
# eleven passes find one of 2**32 keys; mostly five do, for then only one logit is left.
_WAYS = 8


def as_words(logits: torch.Tensor) -> torch.Tensor:
    """Logits as kernels take them: bfloat16 as int16, for the interpreter does not know it."""
    return logits if logits.dtype == torch.float32 else logits.view(torch.int16)


class Bounds:
    """Space for the bounds of up to `max_rows` rows; one step at a time."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bounds = torch.empty(max_rows, dtype=torch.float32, device=device)
        # How often each logit occurs in a row that filters; left zero by who reads it.
        self._counts = torch.zeros(max_rows, _NUM_KEYS, dtype=torch.int32, device=device)

    def find(self, logits: torch.Tensor, params: RowParams) -> torch.Tensor:
        """[max_rows] float32, of logits [num_rows, vocab_size]; -inf where nothing is filtered.

        The logits are float32, or the int16 bits of bfloat16. A row that filters nothing
        costs next to nothing.
        """
        if logits.dtype == torch.float32:
            self._search(logits, params)
        else:
            self._count(logits, params)
        return self._bounds

    def _count(self, bits: torch.Tensor, params: RowParams) -> None:
        num_rows = bits.shape[0]
        _count_kernel[(triton.cdiv(self._vocab_size, _SPLIT), num_rows)](
            bits,
            self._counts,
            *params.filters,
            self._vocab_size,
            bits.stride(0),
            SPLIT=_SPLIT,
            BLOCK=2048,
            NUM_KEYS=_NUM_KEYS,
            num_warps=8,
        )
        _bound_kernel[(num_rows,)](
            self._counts,
            self._bounds,
            params.temperature,
            *params.filters,
            self._vocab_size,
            BLOCK=4096,
            NUM_KEYS=_NUM_KEYS,
            num_warps=16,
        )

    def _search(self, logits: torch.Tensor, params: RowParams) -> None:
        _search_kernel[(logits.shape[0],)](
            logits,
            self._bounds,
            params.temperature,
            *params.filters,
            self._vocab_size,
            logits.stride(0),
            BLOCK=4096,
            WAYS=_WAYS,
            num_warps=16,
        )


@triton.jit
def value_of_bits(bits):  # type: ignore[no-untyped-def]
    """The float32 of a bfloat16 given as int16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(pointers, mask):  # type: ignore[no-untyped-def]
    """float32 of logits that are float32 or bits of bfloat16; 0 where masked out."""
    if pointers.dtype.element_ty == tl.float32:
        return tl.load(pointers, mask, 0.0)
    else:
        return value_of_bits(tl.load(pointers, mask, 0))


@triton.jit
def _key(bits):  # type: ignore[no-untyped-def]
    """An int32 in 0 … 65535 that orders as the bfloat16 with these bits does."""
    word = bits.to(tl.int32) & 0xFFFF
    return tl.where(word >= 0x8000, 0xFFFF - word, word + 0x8000)


@triton.jit
def _value_of_key(key):  # type: ignore[no-untyped-def]
    """The inverse of `_key`, as float32."""
    word = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key)
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):  # type: ignore[no-untyped-def]
    k = tl.load(top_k + row)
    filters = ((k > 0) & (k < vocab_size)) | (tl.load(top_p + row) < 1.0)
    return (filters | (tl.load(min_p + row) > 0.0)) & (tl.load(is_greedy + row) == 0)


@triton.jit
def _count_kernel(  # type: ignore[no-untyped-def]
    logits,
    counts,
    top_k,
    top_p,
    min_p,
    is_greedy,
    vocab_size,
    stride,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_KEYS: tl.constexpr,
):
    row = tl.program_id(1)
    if not _has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
        return
    base = logits + row.to(tl.int64) * stride
    row_counts = counts + row.to(tl.int64) * NUM_KEYS
    column = tl.program_id(0) * SPLIT + tl.arange(0, BLOCK)
    for start in range(0, SPLIT, BLOCK):
        token = column + start
        mask = token < vocab_size
        key = _key(tl.load(base + token, mask, 0))
        tl.atomic_add(row_counts + key, 1, mask=mask, sem="relaxed")


@triton.jit
def _bound_kernel(  # type: ignore[no-untyped-def]
    counts,
    bounds,
    temperature,
    top_k,
    top_p,
    min_p,
    is_greedy,
    vocab_size,
    BLOCK: tl.constexpr,
    NUM_KEYS: tl.constexpr,
):
    row = tl.program_id(0)
    if not _has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
        tl.store(bounds + row, float("-inf"))
        return
    row_counts = counts + row.to(tl.int64) * NUM_KEYS
    inverse_temperature = tl.minimum(1.0 / tl.load(temperature + row), 1e30)
    k = tl.load(top_k + row)
    k = tl.where((k > 0) & (k < vocab_size), k, vocab_size)
    # From the highest key down: the highest one that occurs, and the one that k tokens reach.
    descending = NUM_KEYS - 1 - tl.arange(0, BLOCK)
    seen = 0
    top_key = 0
    bound_key = 0
    for start in range(0, NUM_KEYS, BLOCK):
        key = descending - start
        count = tl.load(row_counts + key)
        before = seen + tl.cumsum(count, 0) - count
        top_key = tl.maximum(top_key, tl.max(tl.where(count > 0, key, 0), 0))
        # The last key at which fewer than k tokens lie above: the k-th token has this key.
        is_reached = (count > 0) & (before < k)
        bound_key = tl.where(
            tl.max(is_reached.to(tl.int32), 0) > 0,
            tl.min(tl.where(is_reached, key, NUM_KEYS), 0),
            bound_key,
        )
        seen += tl.sum(count, 0)
    highest = _value_of_key(top_key)

    kept = 0.0
    for start in range(0, NUM_KEYS, BLOCK):
        key = descending - start
        count = tl.load(row_counts + key)
        occurs = (count > 0) & (key >= bound_key)
        weight = tl.exp((_value_of_key(key) - highest) * inverse_temperature)
        kept += tl.sum(tl.where(occurs, weight * count, 0.0), 0)
    # Likewise the last key at which what lies above does not yet hold p of the rest.
    wanted = kept * tl.load(top_p + row)
    mass = 0.0
    p_key = top_key
    for start in range(0, NUM_KEYS, BLOCK):
        key = descending - start
        count = tl.load(row_counts + key)
        occurs = (count > 0) & (key >= bound_key)
        weight = tl.exp((_value_of_key(key) - highest) * inverse_temperature)
        weight = tl.where(occurs, weight * count, 0.0)
        before = mass + tl.cumsum(weight, 0) - weight
        is_needed = occurs & (before < wanted)
        p_key = tl.minimum(p_key, tl.min(tl.where(is_needed, key, NUM_KEYS), 0))
        mass += tl.sum(weight, 0)
        tl.store(row_counts + key, tl.zeros([BLOCK], tl.int32))
    p_key = tl.where(tl.load(top_p + row) < 1.0, p_key, bound_key)
    bound = _value_of_key(tl.maximum(p_key, bound_key))
    least = tl.load(min_p + row)
    if least > 0.0:
        bound = tl.maximum(bound, highest + tl.log(least) / inverse_temperature)
    # The likeliest token is always admitted.
    tl.store(bounds + row, tl.where(bound <= highest, bound, highest))


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    logits,
    bounds,
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
    """One program a row. All sums are in one order, so that equal rows have equal bounds."""
    row = tl.program_id(0)
    if not _has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
        tl.store(bounds + row, float("-inf"))
        return
    base = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    bottoms = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        mask = start + column < vocab_size
        x = load_logits(base + start + column, mask)
        tops = tl.maximum(tops, tl.where(mask, x, float("-inf")))
        bottoms = tl.minimum(bottoms, tl.where(mask & (x > float("-inf")), x, float("inf")))
    highest = tl.max(tops, 0)
    last = ordered(highest).to(tl.int64)
    bound = ordered(tl.minimum(tl.min(bottoms, 0), highest)).to(tl.int64)

    k = tl.load(top_k + row)
    if (k > 0) & (k < vocab_size):
        # At this temperature every token weighs 1.
        bound = _reach(base, vocab_size, bound, last, highest, 0.0, k * 1.0, BLOCK, WAYS)
    p = tl.load(top_p + row)
    inverse_temperature = tl.minimum(1.0 / tl.load(temperature + row), 1e30)
    if p < 1.0:
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = load_logits(base + start + column, start + column < vocab_size)
            is_kept = (start + column < vocab_size) & (ordered(x) >= bound)
            kept += tl.where(is_kept, _weight(x, highest, inverse_temperature), 0.0)
        wanted = tl.sum(kept, 0) * p
        bound = _reach(
            base, vocab_size, bound, last, highest, inverse_temperature, wanted, BLOCK, WAYS
        )
    least = _value_of_ordered(bound.to(tl.int32))
    fraction = tl.load(min_p + row)
    if fraction > 0.0:
        least = tl.maximum(least, highest + tl.log(fraction) / inverse_temperature)
    # The likeliest token is always admitted.
    tl.store(bounds + row, tl.where(least <= highest, least, highest))


@triton.jit
def _reach(  # type: ignore[no-untyped-def]
    base,
    vocab_size,
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
    column = tl.arange(0, BLOCK)
    way = tl.arange(0, WAYS) + 1
    while lo < hi:
        step = (hi - lo) // (WAYS + 1) + 1
        # Beyond the largest int32 there is no logit.
        thresholds = tl.minimum(lo + way * step, 0x7FFFFFFF).to(tl.int32)[:, None]
        weights = tl.zeros([WAYS, BLOCK], tl.float32)
        least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        most = tl.full([BLOCK], -0x80000000, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            mask = start + column < vocab_size
            x = load_logits(base + start + column, mask)
            key = ordered(x)
            weight = tl.where(mask, _weight(x, highest, inverse_temperature), 0.0)
            weights += tl.where(key[None, :] >= thresholds, weight[None, :], 0.0)
            inside = mask & (key >= lo) & (key <= hi)
            least = tl.minimum(least, tl.where(inside, key, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(inside, key, -0x80000000))
        sums = tl.sum(weights, 1)
        num_reached = tl.sum((sums >= target).to(tl.int32), 0)
        reached = tl.min(tl.where(sums >= target, sums, float("inf")), 0)
        # Nothing is left to tell apart; with one logit left, all keys up to it are alike.
        is_one = tl.min(least, 0) >= tl.max(most, 0)
        above = lo + num_reached * step
        hi = tl.minimum(hi, above + step - 1)
        hi = tl.where(reached == target, above, hi)
        hi = tl.where(is_one, lo, hi)
        lo = tl.where(is_one, lo, above)
    return lo


@triton.jit
def _weight(x, highest, inverse_temperature):  # type: ignore[no-untyped-def]
    """Unnormalised probability; 0 of -inf at any temperature."""
    # Finite, so that times 0 it is 0.
    below = tl.maximum(x - highest, -3e38)
    return tl.where(x > float("-inf"), tl.exp(below * inverse_temperature), 0.0)


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """An int32 that orders as the float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of_ordered(key):  # type: ignore[no-untyped-def]
    """The inverse of `ordered`, which is its own."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
