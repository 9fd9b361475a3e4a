"""Draws one token for each row on the device: exact, seeded, and blind to its batch mates.

A draw is the argmax of logit / temperature + Gumbel noise (the Gumbel-max trick, so no
softmax and no sort), and the noise is a hash of (seed, position, token id). Top-k, top-p
and min-p become one lowest admitted logit per row. Logits are bfloat16, so that bound is
found exactly by bisecting 16 bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

# Token id that stands for a row whose logits were not finite.
FAULTY = -1
_SPLIT = 16384


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
        _bound_kernel[(num_rows,)](
            bits,
            self._bounds,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.is_greedy,
            self._vocab_size,
            bits.stride(0),
            BLOCK=8192,
            num_warps=16,
        )
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
def _bound_kernel(  # type: ignore[no-untyped-def]
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
):
    row = tl.program_id(0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    has_k = (k > 0) & (k < vocab_size)
    if (tl.load(is_greedy + row) != 0) | ((not has_k) & (p >= 1.0) & (least <= 0.0)):
        tl.store(bounds + row, float("-inf"))
        return
    base = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    inverse_temperature = tl.minimum(1.0 / tl.load(temperature + row), 1e30)
    highest = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        mask = start + column < vocab_size
        x = tl.where(mask, _value(tl.load(base + start + column, mask, 0)), float("-inf"))
        highest = tl.maximum(highest, tl.max(x, 0))

    # The highest key that at least k tokens reach.
    key_bound = 0
    if has_k:
        for i in range(16):
            candidate = key_bound | (1 << (15 - i))
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab_size, BLOCK):
                mask = start + column < vocab_size
                key = _key(tl.load(base + start + column, mask, 0))
                count += (mask & (key >= candidate)).to(tl.int32)
            key_bound = tl.where(tl.sum(count, 0) >= k, candidate, key_bound)
    # The highest key whose tokens and those above hold p of what top-k left.
    if p < 1.0:
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            mask = start + column < vocab_size
            bits = tl.load(base + start + column, mask, 0)
            weight = tl.exp((_value(bits) - highest) * inverse_temperature)
            kept += tl.where(mask & (_key(bits) >= key_bound), weight, 0.0)
        wanted = tl.sum(kept, 0) * p
        p_bound = 0
        for i in range(16):
            candidate = p_bound | (1 << (15 - i))
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab_size, BLOCK):
                mask = start + column < vocab_size
                bits = tl.load(base + start + column, mask, 0)
                weight = tl.exp((_value(bits) - highest) * inverse_temperature)
                mass += tl.where(mask & (_key(bits) >= candidate), weight, 0.0)
            p_bound = tl.where(tl.sum(mass, 0) >= wanted, candidate, p_bound)
        key_bound = tl.maximum(key_bound, p_bound)
    word = tl.where(key_bound >= 0x8000, key_bound - 0x8000, 0xFFFF - key_bound)
    bound = (word << 16).to(tl.float32, bitcast=True)
    bound = tl.where(key_bound == 0, float("-inf"), bound)
    if least > 0.0:
        bound = tl.maximum(bound, highest + tl.log(least) / inverse_temperature)
    # The likeliest token is always admitted; NaN logits leave no bound and are found later.
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
