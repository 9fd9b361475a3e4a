"""What adjusts the logits of the rows that ask for it, kept on the device between steps.

A row's opening writes all of it, and each step that samples counts its own token, so the
next step finds the count right although the host does not know the token yet. How often a
token was seen is a number for each token of the vocabulary and each row: 156 MB for 256
rows of 151936 tokens. A list of the row's tokens would be smaller, but each of the
vocabulary's tokens would have to be sought in it.
"""

import torch
import triton
import triton.language as tl

from worker.engine.cuda import packing
from worker.engine.cuda.logits import is_permitted, load_logits
from worker.engine.cuda.packing import Features

# The most that a request may ask for.
MOST_BIASES = 1024
# Tokens of a program, a multiple of a mask's 32.
_BLOCK = 8192
_ROW = tl.constexpr(packing.ROW)
_FIRST_TOKEN = tl.constexpr(packing.FIRST_TOKEN)
_NUM_TOKENS = tl.constexpr(packing.NUM_TOKENS)
_PROMPT_LEN = tl.constexpr(packing.PROMPT_LEN)
_ALWAYS = tl.constexpr(packing.ALWAYS)
_FIRST_BIAS = tl.constexpr(packing.FIRST_BIAS)
_NUM_BIASES = tl.constexpr(packing.NUM_BIASES)
_MIN_LEN = tl.constexpr(packing.MIN_LEN)
_REPETITION = tl.constexpr(packing.REPETITION)
_FREQUENCY = tl.constexpr(packing.FREQUENCY)
_PRESENCE = tl.constexpr(packing.PRESENCE)
_OPENING_WORDS = tl.constexpr(packing.OPENING_WORDS)


def mask_words(vocab_size: int) -> int:
    """int32 words of one bit for each token."""
    return -(-vocab_size // 32)


class RowState:
    """State of every row and of one row more, which warm-up may spoil; zeros until opened."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        num_rows = max_rows + 1
        self._vocab_size = vocab_size
        self._num_words = mask_words(vocab_size)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # Twice how often the token was sampled, plus one if the prompt has it.
        self._seen = zeros(num_rows, vocab_size)
        # Bits of what is permitted, at any position and before the row's MIN_LEN.
        self._permitted = zeros(num_rows, 2, self._num_words)
        self._bias_ids = zeros(num_rows, MOST_BIASES)
        self._bias_values = zeros(num_rows, MOST_BIASES, dtype=torch.float32)
        # The opening's words.
        self._params = zeros(num_rows, packing.OPENING_WORDS)

    def open(self, features: Features, words: torch.Tensor) -> None:
        """Takes a plan's openings; `words` are the features' on the device."""
        if features.num_openings == 0:
            return
        openings = words[features.openings]
        _open_kernel[(triton.cdiv(self._vocab_size, _BLOCK), features.num_openings)](
            openings,
            words[features.masks],
            words[features.bias_ids],
            words[features.bias_values],
            self._seen,
            self._permitted,
            self._bias_ids,
            self._bias_values,
            self._params,
            self._vocab_size,
            self._num_words,
            MOST=MOST_BIASES,
            BLOCK=_BLOCK,
            num_warps=8,
        )
        _see_kernel[(triton.cdiv(features.longest_opening, 1024), features.num_openings)](
            openings, words[features.token_ids], self._seen, self._vocab_size, BLOCK=1024
        )

    def adjust(
        self,
        out: torch.Tensor,
        logits: torch.Tensor,
        places: torch.Tensor,
        *,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """out[i] = the logits that the plan's row places[i] draws from, float32.

        `logits` [num plan rows, vocab_size] are int16 bits of bfloat16, or float32; `rows` and
        `positions` are those of `places`, in their order.
        """
        num_adjusted = len(places)
        state = (self._seen, self._permitted, self._params)
        sizes = (self._vocab_size, logits.stride(0), self._num_words)
        # Not fused: the reference rounds after each operation, too.
        options = {"num_warps": 8, "enable_fp_fusion": False}
        _adjust_kernel[(triton.cdiv(self._vocab_size, 4096), num_adjusted)](
            out, logits, places, rows, positions, *state, *sizes, BLOCK=4096, **options
        )
        _bias_kernel[(num_adjusted,)](
            out,
            logits,
            places,
            rows,
            positions,
            *state,
            self._bias_ids,
            self._bias_values,
            *sizes,
            BLOCK=MOST_BIASES,
            **options,
        )

    def count(
        self,
        drawn: torch.Tensor,
        token_ids: torch.Tensor,
        places: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Puts what the rows `places` of the plan drew where its tokens are, and counts it.

        `token_ids` hold what they drew from the model's own logits: if those were faulty, they
        stay so.
        """
        _count_kernel[(len(places),)](drawn, token_ids, places, rows, self._seen, self._vocab_size)


@triton.jit
def _open_kernel(  # type: ignore[no-untyped-def]
    openings,
    masks,
    new_bias_ids,
    new_bias_values,
    seen,
    permitted,
    bias_ids,
    bias_values,
    settings,
    vocab_size,
    num_words,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    opening = openings + tl.program_id(1) * _OPENING_WORDS
    row = tl.load(opening + _ROW).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(seen + row * vocab_size + token, tl.zeros([BLOCK], tl.int32), token < vocab_size)
    word = part * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    exists = word < num_words
    for early in tl.static_range(2):
        index = tl.load(opening + _ALWAYS + early)
        given = tl.load(masks + index * num_words + word, exists & (index >= 0), -1)
        tl.store(permitted + (row * 2 + early) * num_words + word, given, exists)
    if part == 0:
        field = tl.arange(0, 16)
        is_field = field < _OPENING_WORDS
        tl.store(
            settings + row * _OPENING_WORDS + field, tl.load(opening + field, is_field), is_field
        )
        i = tl.arange(0, MOST)
        is_given = i < tl.load(opening + _NUM_BIASES)
        first = tl.load(opening + _FIRST_BIAS)
        ids = tl.load(new_bias_ids + first + i, is_given, 0)
        values = tl.load(new_bias_values + first + i, is_given, 0)
        tl.store(bias_ids + row * MOST + i, ids, is_given)
        tl.store(bias_values + row * MOST + i, values.to(tl.float32, bitcast=True), is_given)


@triton.jit
def _see_kernel(openings, token_ids, seen, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    opening = openings + tl.program_id(1) * _OPENING_WORDS
    row = tl.load(opening + _ROW).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = i < tl.load(opening + _NUM_TOKENS)
    token = tl.load(token_ids + tl.load(opening + _FIRST_TOKEN) + i, exists, 0)
    is_prompt = i < tl.load(opening + _PROMPT_LEN)
    counter = seen + row * vocab_size + token
    tl.atomic_or(counter, 1, mask=exists & is_prompt, sem="relaxed")
    tl.atomic_add(counter, 2, mask=exists & (i >= tl.load(opening + _PROMPT_LEN)), sem="relaxed")


@triton.jit
def _param(settings, row, field):  # type: ignore[no-untyped-def]
    return tl.load(settings + row * _OPENING_WORDS + field)


@triton.jit
def _adjusted(  # type: ignore[no-untyped-def]
    x, bias, token, exists, row, position, seen, permitted, settings, vocab_size, num_words
):
    """Logits x of tokens as the row's opening asks; see RowOpening for the order."""
    times = tl.load(seen + row * vocab_size + token, exists, 0)
    x = x + bias
    repetition = _param(settings, row, _REPETITION).to(tl.float32, bitcast=True) + tl.zeros_like(x)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    # A penalty next to 0 must not make a fault of a logit that the model meant.
    LARGEST: tl.constexpr = 3.4028234663852886e38
    repeated = tl.where(repeated > LARGEST, LARGEST, repeated)
    repeated = tl.where(repeated < -LARGEST, -LARGEST, repeated)
    x = tl.where((times != 0) & (repetition != 1.0), repeated, x)
    count = times >> 1
    frequency = _param(settings, row, _FREQUENCY).to(tl.float32, bitcast=True)
    presence = _param(settings, row, _PRESENCE).to(tl.float32, bitcast=True)
    x = x - (frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0))
    early = (position < _param(settings, row, _MIN_LEN)).to(tl.int64)
    mask = permitted + (row * 2 + early) * num_words
    return tl.where(is_permitted(mask, token, exists), x, float("-inf"))


@triton.jit
def _adjust_kernel(  # type: ignore[no-untyped-def]
    out,
    logits,
    places,
    rows,
    positions,
    seen,
    permitted,
    settings,
    vocab_size,
    stride,
    num_words,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    x = load_logits(logits + tl.load(places + entry).to(tl.int64) * stride + token, exists)
    row = tl.load(rows + entry).to(tl.int64)
    position = tl.load(positions + entry)
    x = _adjusted(
        x, 0.0, token, exists, row, position, seen, permitted, settings, vocab_size, num_words
    )
    tl.store(out + entry.to(tl.int64) * vocab_size + token, x, exists)


@triton.jit
def _bias_kernel(  # type: ignore[no-untyped-def]
    out,
    logits,
    places,
    rows,
    positions,
    seen,
    permitted,
    settings,
    bias_ids,
    bias_values,
    vocab_size,
    stride,
    num_words,
    BLOCK: tl.constexpr,
):
    """Once more, for the few tokens that have a bias, which comes before the penalties."""
    entry = tl.program_id(0)
    row = tl.load(rows + entry).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < _param(settings, row, _NUM_BIASES)
    token = tl.load(bias_ids + row * BLOCK + i, exists, 0)
    bias = tl.load(bias_values + row * BLOCK + i, exists, 0.0)
    x = load_logits(logits + tl.load(places + entry).to(tl.int64) * stride + token, exists)
    position = tl.load(positions + entry)
    x = _adjusted(
        x, bias, token, exists, row, position, seen, permitted, settings, vocab_size, num_words
    )
    tl.store(out + entry.to(tl.int64) * vocab_size + token, x, exists)


@triton.jit
def _count_kernel(drawn, token_ids, places, rows, seen, vocab_size):  # type: ignore[no-untyped-def]
    entry = tl.program_id(0)
    place = token_ids + tl.load(places + entry)
    # What the model said may be unsound although what is left of it is not.
    token = tl.where(tl.load(place) < 0, -1, tl.load(drawn + entry))
    tl.store(place, token)
    if token >= 0:
        counter = seen + tl.load(rows + entry).to(tl.int64) * vocab_size + token
        tl.store(counter, tl.load(counter) + 2)
