"""The reference for adjusted logits: penalties, bias, allowed and banned ids, and masks.

What changes from token to token is kept sparse: a request meets far fewer ids than a
vocabulary has, so a step touches those alone. All in numpy on the engine's thread, where an
operation this small costs less than torch takes to start one.
"""

from collections.abc import Iterable

import numpy as np

from worker.step import Float32Array, Int32Array, RowOpening

_LARGEST = np.finfo(np.float32).max
_FORBIDDEN = np.float32(-np.inf)
# [256, 8] what eight bits of a mask add to their logits. Looked up and added, a vocabulary of
# 49 thousand takes 12 µs whatever the mask; unpacked and chosen by, up to 400.
_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    _FORBIDDEN,
)
_ADDENDS.flags.writeable = False


class RowAdjustment:
    """What one row's opening said, and the tokens counted since."""

    def __init__(self, opening: RowOpening) -> None:
        self.row = opening.row
        self._opening = opening
        self._repetition = np.float32(opening.repetition_penalty)
        self._frequency = np.float32(opening.frequency_penalty)
        self._presence = np.float32(opening.presence_penalty)
        self._counts_sampled = bool(self._frequency or self._presence)
        self._has_penalties = self._repetition != 1 or self._counts_sampled
        # Ids that a penalty touches, with how often each was sampled, and where each is.
        self._ids, self._counts = self._counted(opening)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def count(self, token_id: int) -> None:
        """Takes note of a sampled token."""
        if not self._has_penalties:
            return
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            room = np.zeros(max(16, len(self._ids)), np.int32)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room))
        self._ids[place] = token_id
        self._counts[place] += 1

    def apply(self, logits: Float32Array, position: int) -> None:
        """Changes a row [vocab_size], whose token will stand at `position`, in place."""
        opening = self._opening
        if len(opening.bias_ids):
            logits[opening.bias_ids] += opening.bias_values
        if self._places:
            self._penalise(logits)
        if opening.allowed_ids is not None:
            kept = logits[opening.allowed_ids]
            logits.fill(_FORBIDDEN)
            logits[opening.allowed_ids] = kept
        if position < opening.min_len:
            logits[opening.banned_ids] = _FORBIDDEN

    def _penalise(self, logits: Float32Array) -> None:
        ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
        values = logits[ids]
        if self._repetition != 1:
            # A penalty next to 0 must not make a fault of a logit that the model meant.
            with np.errstate(over="ignore"):
                values = np.where(
                    values > 0, values / self._repetition, values * self._repetition
                ).clip(-_LARGEST, _LARGEST)
        if self._counts_sampled:
            values -= self._frequency * counts.astype(np.float32) + self._presence * (counts > 0)
        logits[ids] = values

    def _counted(self, opening: RowOpening) -> tuple[Int32Array, Int32Array]:
        if not self._has_penalties:
            nothing = np.empty(0, np.int32)
            return nothing, nothing
        sampled, counts = np.unique(opening.token_ids[opening.prompt_len :], return_counts=True)
        if self._repetition == 1:
            return sampled, counts.astype(np.int32)
        ids = np.unique(opening.token_ids)
        of_all = np.zeros(len(ids), np.int32)
        of_all[np.searchsorted(ids, sampled)] = counts
        return ids, of_all


class Adjustments:
    """The adjusted rows' state; belongs to the engine's thread."""

    def __init__(self) -> None:
        self._rows: dict[int, RowAdjustment] = {}

    def open(self, opened: Iterable[RowAdjustment]) -> None:
        for adjustment in opened:
            self._rows[adjustment.row] = adjustment

    def apply(
        self, logits: Float32Array, places: Int32Array, rows: Int32Array, positions: Int32Array
    ) -> None:
        """Changes the logits at `places`, which are those of `rows`, in place."""
        for place, row, position in zip(
            places.tolist(), rows.tolist(), positions.tolist(), strict=True
        ):
            # Without state if the step that would have opened the row failed.
            if (adjustment := self._rows.get(row)) is not None:
                adjustment.apply(logits[place], position)

    def count(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Takes note of what adjusted rows sampled."""
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if (adjustment := self._rows.get(row)) is not None:
                adjustment.count(token_id)


def apply_masks(logits: Float32Array, places: Int32Array, bitmasks: Int32Array) -> None:
    """Changes the logits at `places` in place: -inf where a mask's bit is not set."""
    vocab_size = logits.shape[1]
    octets = bitmasks.astype("<i4", copy=False).view(np.uint8)
    with np.errstate(invalid="ignore"):  # of a faulty row, where infinities meet
        for place, row in zip(places.tolist(), octets, strict=True):
            logits[place] += _ADDENDS.take(row, axis=0).ravel()[:vocab_size]
