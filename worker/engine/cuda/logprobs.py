"""Log-probabilities, ranks and likeliest tokens, of the model's own logits.

Sums are of float32 in one order, so that a token's numbers do not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from worker.engine.cuda.logits import load_logits, ordered
from worker.step import Int32Array, TokenLogprobs

# The most that a request may ask for.
MOST_TOP = 20
# Tokens of a program: that sums, and that seeks the likeliest, which it holds in registers.
_SPLIT = 16384
_TOP_SPLIT = 4096


def entry_words(num_top: int) -> int:
    """int32 words of an entry: log-probability, rank, top ids, top log-probabilities."""
    return 2 + 2 * num_top


def from_words(words: Int32Array, num_top: int) -> TokenLogprobs:
    """Copies of entries [num_entries, entry_words(num_top)]."""
    floats = words.view("float32")
    return TokenLogprobs(
        logprobs=floats[:, 0].copy(),
        ranks=words[:, 1].copy(),
        top_ids=words[:, 2 : 2 + num_top].copy(),
        top_logprobs=floats[:, 2 + num_top :].copy(),
    )


class Logprobs:
    """Space for up to `max_entries` at once; what it gives lives until the next call."""

    def __init__(self, max_entries: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_splits = triton.cdiv(vocab_size, _SPLIT)
        self._num_top_splits = triton.cdiv(vocab_size, _TOP_SPLIT)
        # Of each split: highest logit, sum of exponentials relative to it.
        shape = (2, max_entries, self._num_splits)
        self._sums = torch.empty(shape, dtype=torch.float32, device=device)
        # Of each split: how many logits are greater than the token's.
        self._greater = torch.empty(shape[1:], dtype=torch.int32, device=device)
        self._best = torch.empty(
            max_entries, self._num_top_splits, MOST_TOP, dtype=torch.int64, device=device
        )
        self._out = torch.empty(
            max_entries, entry_words(MOST_TOP), dtype=torch.int32, device=device
        )

    def compute(
        self, logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> torch.Tensor:
        """Words [num_entries, entry_words(num_top)] of token_ids[i] in the logits of rows[i].

        The logits [·, vocab_size] are int16 bits of bfloat16, or float32; a negative token id
        gives an entry without meaning.
        """
        num_entries = len(rows)
        sizes = (self._vocab_size, logits.stride(0))
        _sum_kernel[(self._num_splits, num_entries)](
            logits,
            rows,
            token_ids,
            self._sums[0],
            self._sums[1],
            self._greater,
            *sizes,
            SPLIT=_SPLIT,
            BLOCK=2048,
            num_warps=8,
        )
        if num_top:
            _top_kernel[(self._num_top_splits, num_entries)](
                logits,
                rows,
                self._best,
                num_top,
                *sizes,
                MOST=MOST_TOP,
                BLOCK=_TOP_SPLIT,
                num_warps=8,
            )
        width = entry_words(num_top)
        out = self._out.view(-1)[: num_entries * width].view(num_entries, width)
        _join_kernel[(num_entries,)](
            out,
            logits,
            rows,
            token_ids,
            self._sums[0],
            self._sums[1],
            self._greater,
            self._best,
            num_top,
            *sizes,
            self._num_splits,
            self._num_top_splits,
            MOST=MOST_TOP,
            BLOCK=triton.next_power_of_2(self._num_splits),
            TOP_BLOCK=triton.next_power_of_2(self._num_top_splits * MOST_TOP),
            num_warps=4,
        )
        return out


# Entries begin anywhere in their arrays.
@triton.jit(do_not_specialize_on_alignment=["rows", "token_ids"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    token_ids,
    highest,
    sums,
    greater,
    vocab_size,
    stride,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    entry = tl.program_id(1)
    base = logits + tl.load(rows + entry).to(tl.int64) * stride
    chosen = load_logits(base + tl.maximum(tl.load(token_ids + entry), 0), True)
    column = tl.arange(0, BLOCK)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, vocab_size)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    num_greater = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        exists = start + column < end
        x = load_logits(base + start + column, exists)
        top = tl.maximum(top, tl.where(exists, x, float("-inf")))
        num_greater += (exists & (x > chosen)).to(tl.int32)
    top = tl.max(top, 0)
    # A split of nothing but -inf weighs 0, not NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        exists = start + column < end
        x = load_logits(base + start + column, exists)
        weights += tl.where(exists, tl.exp(x - shift), 0.0)
    place = entry * tl.num_programs(0) + split
    tl.store(highest + place, top)
    tl.store(sums + place, tl.sum(weights, 0))
    tl.store(greater + place, tl.sum(num_greater, 0))


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["rows"])
def _top_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    best,
    num_top,
    vocab_size,
    stride,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The likeliest of a split, one after the other; of equal ones the lowest id first."""
    entry = tl.program_id(1)
    base = logits + tl.load(rows + entry).to(tl.int64) * stride
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    # Of the two zeros neither is greater.
    x = load_logits(base + token, exists) + 0.0
    # Logit above, id below: unique, and ordered as asked for.
    key = (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    key = tl.where(exists, key, -0x8000000000000000)
    place = best + (entry * tl.num_programs(0) + tl.program_id(0)) * MOST
    for i in range(num_top):
        highest = tl.max(key, 0)
        tl.store(place + i, highest)
        key = tl.where(key == highest, -0x8000000000000000, key)


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["rows", "token_ids"])
def _join_kernel(  # type: ignore[no-untyped-def]
    out,
    logits,
    rows,
    token_ids,
    highest,
    sums,
    greater,
    best,
    num_top,
    vocab_size,
    stride,
    num_splits,
    num_top_splits,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    base = logits + tl.load(rows + entry).to(tl.int64) * stride
    split = tl.arange(0, BLOCK)
    exists = split < num_splits
    place = entry * num_splits + split
    tops = tl.load(highest + place, exists, float("-inf"))
    top = tl.max(tops, 0)
    weights = tl.load(sums + place, exists, 0.0)
    total = tl.sum(weights * tl.where(weights == 0.0, 0.0, tl.exp(tops - top)), 0)
    log_total = top + tl.log(total)
    chosen = load_logits(base + tl.maximum(tl.load(token_ids + entry), 0), True)
    mine = out + entry * (2 + 2 * num_top)
    tl.store(mine, (chosen - log_total).to(tl.int32, bitcast=True))
    tl.store(mine + 1, 1 + tl.sum(tl.load(greater + place, exists, 0), 0))
    if num_top > 0:
        i = tl.arange(0, TOP_BLOCK)
        is_candidate = (i < num_top_splits * MOST) & (i % MOST < num_top)
        candidates = best + entry * (num_top_splits * MOST)
        key = tl.load(candidates + i, is_candidate, -0x8000000000000000)
        for rank in range(num_top):
            likeliest = tl.max(key, 0)
            token = 0x7FFFFFFF - (likeliest & 0xFFFFFFFF).to(tl.int32)
            x = load_logits(base + tl.minimum(token, vocab_size - 1), True)
            tl.store(mine + 2 + rank, token)
            logprob = (x - log_total).to(tl.int32, bitcast=True)
            tl.store(mine + 2 + num_top + rank, logprob)
            key = tl.where(key == likeliest, -0x8000000000000000, key)
