"""Draws one token for each row on the device: exact, seeded, and blind to its batch mates.

A draw is the argmax of logit / temperature + Gumbel noise (the Gumbel-max trick, so no
softmax and no sort), and the noise is a hash of (seed, position, token id), the same as
the reference sampler's. Top-k, top-p and min-p become one lowest admitted logit per row.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from worker.engine.cuda.bounds import Bounds
from worker.engine.cuda.logits import as_words, is_drawn, is_permitted, load_logits
from worker.engine.cuda.row_params import RowParams

# Token id that stands for a row whose logits were not finite.
FAULTY = -1
# Tokens of a program.
_SPLIT = 16384


class Sampler:
    """Space for the partial results of up to `max_rows` rows; one step at a time."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_splits = triton.cdiv(vocab_size, _SPLIT)
        shape = (max_rows, self._num_splits)
        self._best = torch.empty(shape, dtype=torch.float32, device=device)
        self._best_ids = torch.empty(shape, dtype=torch.int32, device=device)
        self._bounds = Bounds(max_rows, vocab_size, device)

    def sample(
        self,
        logits: torch.Tensor,
        params: RowParams,
        write_rows: torch.Tensor,
        token_pool: torch.Tensor,
        token_ids: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> None:
        """Draws for `logits` [num_rows, vocab_size], the model's bfloat16 or adjusted float32.

        Without `masks` [any, mask words] the rows draw that have none, and with them those that
        have one, what it permits.

        token_pool[write_rows] and `token_ids` take the tokens; the latter takes FAULTY for a
        row whose logits are not finite, and the pool 0.
        """
        num_rows = logits.shape[0]
        words = as_words(logits)
        _draw_kernel[(self._num_splits, num_rows)](
            words,
            params.mask_number,
            # Something to point at: it is not read.
            words if masks is None else masks,
            self._bounds.find(words, params, masks),
            self._best,
            self._best_ids,
            params.temperature,
            params.seed_low,
            params.seed_high,
            params.is_greedy,
            params.positions,
            self._vocab_size,
            words.stride(0),
            IS_MASKED=masks is not None,
            SPLIT=_SPLIT,
            BLOCK=2048,
            FAST=not triton.knobs.runtime.interpret,
            num_warps=8,
        )
        _choose_kernel[(num_rows,)](
            params.mask_number,
            self._best,
            self._best_ids,
            write_rows,
            token_pool,
            token_ids,
            self._num_splits,
            IS_MASKED=masks is not None,
            BLOCK=triton.next_power_of_2(self._num_splits),
            num_warps=1,
        )


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
def _gumbel(token, stream, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise of each token, from its own hash."""
    LN2: tl.constexpr = 0.6931471805599453
    h = _mix(token.to(tl.uint32) * 0x9E3779B1 + stream)
    # In (0, 1); fine near 0, where the winners come from. -log(1 - u) is exponential:
    # by its series for small u, where the device's logarithm is not exact enough.
    u = (h.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    u = tl.minimum(u, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    exponential = tl.where(u < 0.03125, series, -LN2 * _log2(1.0 - u, FAST))
    return -LN2 * _log2(exponential, FAST)


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    mask_numbers,
    masks,
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
    IS_MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    mask_number = tl.load(mask_numbers + row)
    if not is_drawn(mask_number, IS_MASKED):
        return
    mask = masks
    if IS_MASKED:
        mask = masks + (mask_number - 1) * tl.cdiv(vocab_size, 32)
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
        exists = token < end
        x = load_logits(base + token, exists)
        is_faulty |= (exists & ((x != x) | (x == float("inf")))).to(tl.int32)
        if IS_MASKED:
            x = tl.where(is_permitted(mask, token, exists), x, float("-inf"))
        score = x * inverse_temperature
        if not greedy:
            score = score + _gumbel(token, stream, FAST)
        score = tl.where(exists & (x >= bound), score, float("-inf"))
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
    mask_numbers,
    best,
    best_ids,
    write_rows,
    token_pool,
    token_ids,
    num_splits,
    IS_MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if not is_drawn(tl.load(mask_numbers + row), IS_MASKED):
        return
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
