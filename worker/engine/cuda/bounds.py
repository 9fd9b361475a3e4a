"""The lowest logit that top-k, top-p and min-p admit, one for each row, exactly.

Filters keep tokens by value, so what they keep is all from some logit on. Two ways to it:
the model's bfloat16 logits take only 65536 values, which are counted; adjusted logits are
float32, and their bound is searched by key, an integer that orders as the logit does.
"""

import torch
import triton
import triton.language as tl

from worker.engine.cuda.bound_search import MOST_CANDIDATES, search_bounds
from worker.engine.cuda.logits import has_filter
from worker.engine.cuda.row_params import RowParams

# Tokens of a counting program.
_SPLIT = 16384
_NUM_KEYS = 65536


class Bounds:
    """Space for the bounds of up to `max_rows` rows; one step at a time."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bounds = torch.empty(max_rows, dtype=torch.float32, device=device)
        # How often each logit occurs in a row that filters; left zero by who reads it.
        self._counts = torch.zeros(max_rows, _NUM_KEYS, dtype=torch.int32, device=device)
        self._candidates = torch.empty(max_rows, MOST_CANDIDATES, device=device)

    def find(self, logits: torch.Tensor, params: RowParams) -> torch.Tensor:
        """[max_rows] float32, of logits [num_rows, vocab_size]; -inf where nothing is filtered.

        The logits are float32, or the int16 bits of bfloat16. A row that filters nothing
        costs next to nothing.
        """
        if logits.dtype == torch.float32:
            search_bounds(logits, params, self._candidates, self._bounds, self._vocab_size)
        else:
            self.count(logits, params)
        return self._bounds

    def count(self, bits: torch.Tensor, params: RowParams) -> None:
        """`find` by counting, of bits of bfloat16."""
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
    if not has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
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
    if not has_filter(row, top_k, top_p, min_p, is_greedy, vocab_size):
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
