"""What a plan asks beyond ordinary draws, as words that travel with its staging copy."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from worker.engine.cuda.staging import align_words
from worker.step import Int32Array, RowOpening, StepPlan

# Fields of an opening; the last three are float32. ALWAYS and EARLY are masks of what is
# permitted, at any position and before MIN_LEN: an index into the masks, or NO_MASK.
ROW, FIRST_TOKEN, NUM_TOKENS, PROMPT_LEN, ALWAYS, EARLY = range(6)
FIRST_BIAS, NUM_BIASES, MIN_LEN = range(6, 9)
REPETITION, FREQUENCY, PRESENCE = range(9, 12)
OPENING_WORDS = 12
NO_MASK = -1


@dataclass(frozen=True, slots=True)
class Features:
    """The words of one plan and where its parts lie in them."""

    words: Int32Array
    # [num_openings, OPENING_WORDS], and what they point into.
    openings: slice
    num_openings: int
    longest_opening: int
    token_ids: slice
    # [num_masks, mask words]
    masks: slice
    bias_ids: slice
    bias_values: slice
    # Indices of the plan's rows that are adjusted, and padding.
    adjusted: slice
    num_adjusted: int
    # Whether any of them has a late mask.
    has_masked: bool
    # Indices of the plan's rows whose token's log-probability is wanted.
    logprob_rows: slice
    num_top: int
    prompt_inputs: slice
    prompt_targets: slice
    num_prompt_top: int


def pack(plan: StepPlan, vocab_size: int) -> Features | None:
    """None for a plan that asks no more than that; a late mask needs nothing of this."""
    asked = plan.logprobs
    if not (plan.openings or len(plan.adjusted) or asked):
        return None
    words = _Words()
    nothing = np.empty(0, np.int32)
    header, token_ids, masks, bias_ids, bias_values = _openings(plan.openings, vocab_size)
    places = {
        "openings": words.add(header),
        "token_ids": words.add(token_ids),
        "masks": words.add(masks),
        "bias_ids": words.add(bias_ids),
        "bias_values": words.add(bias_values),
        "adjusted": words.add(_padded(plan.adjusted)),
        "logprob_rows": words.add(asked.rows if asked else nothing),
        "prompt_inputs": words.add(asked.prompt_inputs if asked else nothing),
        "prompt_targets": words.add(asked.prompt_targets if asked else nothing),
    }
    return Features(
        words=words.joined(),
        num_openings=len(plan.openings),
        longest_opening=max((len(one.token_ids) for one in plan.openings), default=0),
        num_adjusted=len(plan.adjusted),
        has_masked=bool(np.isin(plan.adjusted, plan.masked).any()),
        num_top=asked.num_top if asked else 0,
        num_prompt_top=asked.num_prompt_top if asked else 0,
        **places,
    )


class _Words:
    """Arrays one after the other, each aligned."""

    def __init__(self) -> None:
        self._parts: list[Int32Array] = []
        self._size = 0

    def add(self, array: np.ndarray) -> slice:
        part = array.reshape(-1).view(np.int32)
        place = slice(self._size, self._size + len(part))
        padding = align_words(len(part)) - len(part)
        self._parts += [part, np.zeros(padding, np.int32)]
        self._size += len(part) + padding
        return place

    def joined(self) -> Int32Array:
        return np.concatenate(self._parts)


def _padded(indices: Int32Array) -> Int32Array:
    padded = np.zeros(align_words(len(indices)), np.int32)
    padded[: len(indices)] = indices
    return padded


def _openings(openings: tuple[RowOpening, ...], vocab_size: int) -> list[np.ndarray]:
    """Header, and the token ids, masks, bias ids and bias values that it points into."""
    header = np.zeros((len(openings), OPENING_WORDS), np.int32)
    floats = header.view(np.float32)
    masks: list[Int32Array] = []
    num_tokens = num_biases = 0
    for i, one in enumerate(openings):
        always = _mask(one.allowed_ids, (), vocab_size, masks)
        early = always
        if len(one.banned_ids):
            early = _mask(one.allowed_ids, one.banned_ids, vocab_size, masks)
        header[i, :REPETITION] = (
            one.row,
            num_tokens,
            len(one.token_ids),
            one.prompt_len,
            always,
            early,
            num_biases,
            len(one.bias_ids),
            one.min_len,
        )
        floats[i, REPETITION:] = (
            one.repetition_penalty,
            one.frequency_penalty,
            one.presence_penalty,
        )
        num_tokens += len(one.token_ids)
        num_biases += len(one.bias_ids)
    return [
        header,
        _concatenated((one.token_ids for one in openings), np.int32),
        _concatenated(masks, np.int32),
        _concatenated((one.bias_ids for one in openings), np.int32),
        _concatenated((one.bias_values for one in openings), np.float32),
    ]


def _mask(
    allowed: Int32Array | None,
    banned: Int32Array | tuple[()],
    vocab_size: int,
    masks: list[Int32Array],
) -> int:
    """Adds the mask of what is permitted; its index, or NO_MASK if that is everything."""
    if allowed is None and not len(banned):
        return NO_MASK
    permitted = np.full(-(-vocab_size // 32) * 32, allowed is None)
    if allowed is not None:
        permitted[allowed] = True
    permitted[np.asarray(banned, np.int32)] = False
    masks.append(np.packbits(permitted, bitorder="little").view(np.int32))
    return len(masks) - 1


def _concatenated(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
