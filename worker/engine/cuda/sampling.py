"""Draws one token for each row on the device: exact, seeded, and blind to its batch mates.

A draw is the argmax of logit / temperature + Gumbel noise (the Gumbel-max trick, so no
softmax and no sort), and the noise is a hash of (seed, position, token id), the same as
the reference sampler's. Top-k, top-p and min-p become one lowest admitted logit per row.
Logits are bfloat16, of which there are only 65536, so that bound is found exactly by
counting how often each occurs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

# Token id that stands for a row whose logits were not finite.
FAULTY = -1
# Tokens of a program.
_SPLIT = 16384
_NUM_KEYS = 65536


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters on the device, [num_rows] each."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    # Halves of the 64-bit seeds, as int32 bit patterns.
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    # int32; non-zero: argmax, whatever the rest says.
    is_greedy: torch.Tensor
    # Where the drawn token will stand in its request.
    positions: torch.Tensor


class Sampler:
    """Space for the partial results of up to `max_rows` rows; one step at a time."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_splits = triton.cdiv(vocab_size, _SPLIT)
        shape = (max_rows, self._num_splits)
        self._best = torch.empty(shape, dtype=torch.float32, device=device)
        self._best_ids = torch.empty(shape, dtype=torch.int32, device=device)
        self._bounds = torch.empty(max_rows, dtype=torch.float32, device=device)
        # How often each logit occurs in a row that filters; left zero by who reads it.
        self._counts = torch.zeros(max_rows, _NUM_KEYS, dtype=torch.int32, device=device)

    def sample(
        self,
        logits: torch.Tensor,
        params: RowParams,
        write_rows: torch.Tensor,
        token_pool: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        """Draws for bf16 `logits` [num_rows, vocab_size].

        token_pool[write_rows] and `token_ids` take the tokens; the latter takes FAULTY for a
        row whose logits are not finite, and the pool 0.
        """
        num_rows = logits.shape[0]
        bits = logits.view(torch.int16)
        self._find_bounds(bits, params)
        _draw_kernel[(self._num_splits, num_rows)](
            bits,
            self._bounds,
            self._best,
            self._best_ids,
            params.temperature,
            params.seed_low,
            params.seed_high,
            params.is_greedy,
            params.positions,
            self._vocab_size,
            bits.stride(0),
            SPLIT=_SPLIT,
            BLOCK=2048,
            FAST=not triton.knobs.runtime.interpret,
            num_warps=8,
        )
        _choose_kernel[(num_rows,)](
            self._best,
            self._best_ids,
            write_rows,
            token_pool,
            token_ids,
            self._num_splits,
            BLOCK=triton.next_power_of_2(self._num_splits),
            num_warps=1,
        )

    def _find_bounds(self, bits: torch.Tensor, params: RowParams) -> None:
        """Fills the bounds; a row that filters nothing costs next to nothing."""
        filters = (params.top_k, params.top_p, params.min_p, params.is_greedy)
        num_rows = bits.shape[0]
        _count_kernel[(self._num_splits, num_rows)](
            bits,
            self._counts,
            *filters,
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
            *filters,
            self._vocab_size,
            BLOCK=4096,
            NUM_KEYS=_NUM_KEYS,
            num_warps=16,
        )


@triton.jit
def _value(bits):  # type: ignore[no-untyped-def]
    """The float32 of a bfloat16 given as int16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


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
def _mix(h):  # type: ignore[no-untyped-def]
    """A bijection of 32 bits in which every input bit moves every output bit."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _log2(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The device's own instruction, where tl.log2 is a polynomial of 20. Not interpretable."""
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    bounds,
    best,
    best_ids,
    temperature,
    seed_low,
    seed_high,
    is_greedy,
    positions,
    vocab_size,
    stride,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    LN2: tl.constexpr = 0.6931471805599453
    split = tl.program_id(0)
    row = tl.program_id(1)
    base = logits + row.to(tl.int64) * stride
    greedy = tl.load(is_greedy + row) != 0
    bound = tl.load(bounds + row)
    inverse_temperature = 1.0 / tl.where(greedy, 1.0, tl.load(temperature + row))
    # A temperature next to 0 must not make an infinity of a logit.
    inverse_temperature = tl.minimum(inverse_temperature, 1e30)
    low = tl.load(seed_low + row).to(tl.uint32, bitcast=True)
    high = tl.load(seed_high + row).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row).to(tl.uint32, bitcast=True)
    stream = _mix(_mix(low) + 0x9E3779B9 + high)
    stream = _mix(stream + position * 0x9E3779B1)

    column = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_id = tl.full([BLOCK], 2147483647, tl.int32)
    is_faulty = tl.zeros([BLOCK], tl.int32)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, vocab_size)
    for start in range(begin, end, BLOCK):
        token = start + column
        mask = token < end
        x = _value(tl.load(base + token, mask, 0))
        is_faulty |= (mask & ((x != x) | (x == float("inf")))).to(tl.int32)
        score = x * inverse_temperature
        if not greedy:
            h = _mix(token.to(tl.uint32) * 0x9E3779B1 + stream)
            # In (0, 1); fine near 0, where the winners come from. -log(1 - u) is exponential:
            # by its series for small u, where the device's logarithm is not exact enough.
            u = (h.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
            u = tl.minimum(u, 0.99999994)
            series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
            exponential = tl.where(u < 0.03125, series, -LN2 * _log2(1.0 - u, FAST))
            score = score - LN2 * _log2(exponential, FAST)
        score = tl.where(mask & (x >= bound), score, float("-inf"))
        # Strictly greater: of equal scores the lowest token id wins.
        wins = score > top
        top = tl.where(wins, score, top)
        top_id = tl.where(wins, token, top_id)
    highest = tl.max(top, 0)
    winner = tl.min(tl.where(top == highest, top_id, 2147483647), 0)
    if tl.max(is_faulty, 0) != 0:
        highest = float("inf")
        winner = -1
    index = row * tl.num_programs(0) + split
    tl.store(best + index, highest)
    tl.store(best_ids + index, winner)


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    best, best_ids, write_rows, token_pool, token_ids, num_splits, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    mask = split < num_splits
    score = tl.load(best + row * num_splits + split, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + row * num_splits + split, mask=mask, other=2147483647)
    highest = tl.max(score, 0)
    winner = tl.min(tl.where(score == highest, ids, 2147483647), 0)
    # No token with a finite score: all logits were -inf.
    winner = tl.where(winner == 2147483647, -1, winner)
    tl.store(token_ids + row, winner)
    tl.store(token_pool + tl.load(write_rows + row), tl.maximum(winner, 0))
