"""Adjusted logits against the definition in worker/step.py, written densely in float64."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from worker.engine.adjustments import Adjustments, RowAdjustment, apply_masks
from worker.step import Float32Array, RowOpening

_VOCAB = 71


@dataclass
class Asked:
    """One row's adjustment, and the tokens that its request has so far."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    banned: list[int] = field(default_factory=list)
    min_tokens: int = 0

    def opening(self, row: int = 0) -> RowOpening:
        return RowOpening(
            row=row,
            token_ids=np.array([*self.prompt, *self.sampled], np.int32),
            prompt_len=len(self.prompt),
            repetition_penalty=self.repetition,
            frequency_penalty=self.frequency,
            presence_penalty=self.presence,
            bias_ids=np.array(list(self.bias), np.int32),
            bias_values=np.array(list(self.bias.values()), np.float32),
            allowed_ids=None if self.allowed is None else np.array(self.allowed, np.int32),
            banned_ids=np.array(self.banned, np.int32),
            min_len=len(self.prompt) + self.min_tokens,
        )

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.sampled)

    def reference(self, logits: Float32Array) -> NDArray[np.float64]:
        values = logits.astype(np.float64)
        if self.allowed is not None:
            values[np.setdiff1d(np.arange(len(values)), self.allowed)] = -np.inf
        if len(self.sampled) < self.min_tokens:
            values[self.banned] = -np.inf
        for token, bias in self.bias.items():
            values[token] += bias
        for token in {*self.prompt, *self.sampled}:
            scale = 1 / self.repetition if values[token] > 0 else self.repetition
            values[token] *= scale
        for token in set(self.sampled):
            values[token] -= self.frequency * self.sampled.count(token) + self.presence
        return values


def _logits(rng: np.random.Generator) -> Float32Array:
    return rng.normal(0, 4, _VOCAB).astype(np.float32)


def _assert_matches(actual: Float32Array, wanted: NDArray[np.float64]) -> None:
    finite = np.isfinite(wanted)
    assert (np.isneginf(actual) == ~finite).all()
    # Relative to what float32 can hold of a bias of a hundred.
    scale = np.maximum(1, np.abs(wanted[finite]))
    assert (np.abs(actual[finite] - wanted[finite]) / scale).max(initial=0) < 1e-5


def _random(rng: np.random.Generator) -> Asked:
    def ids(count: int) -> list[int]:
        return [int(token) for token in rng.choice(_VOCAB, count, replace=False)]

    return Asked(
        prompt=[int(token) for token in rng.integers(0, _VOCAB, rng.integers(1, 60))],
        sampled=[int(token) for token in rng.integers(0, _VOCAB, rng.integers(0, 20))],
        repetition=float(rng.choice([1.0, 1.3, 0.7])),
        frequency=float(rng.choice([0.0, 0.5, -1.5])),
        presence=float(rng.choice([0.0, 1.0, -0.25])),
        bias={token: float(rng.uniform(-100, 100)) for token in ids(int(rng.integers(0, 5)))},
        allowed=ids(30) if rng.random() < 0.4 else None,
        banned=ids(3),
        min_tokens=int(rng.integers(0, 12)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_combination_follows_the_definition_token_after_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = _random(rng)
    adjustment = RowAdjustment(asked.opening())
    for _ in range(25):
        logits = _logits(rng)
        wanted = asked.reference(logits)
        adjustment.apply(logits, asked.position)
        _assert_matches(logits, wanted)
        # Few ids, so that they repeat.
        token = int(rng.integers(0, 8))
        adjustment.count(token)
        asked.sampled.append(token)


@pytest.mark.parametrize("seed", range(10))
def test_a_row_opened_anew_goes_on_as_if_it_had_never_been_away(seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = _random(rng)
    stayed = RowAdjustment(asked.opening())
    for token in rng.integers(0, _VOCAB, 12).tolist():
        stayed.count(token)
        asked.sampled.append(token)
    resumed = RowAdjustment(asked.opening())
    one = _logits(rng)
    other = one.copy()
    stayed.apply(one, asked.position)
    resumed.apply(other, asked.position)
    assert one.tobytes() == other.tobytes()


def test_only_the_prompt_s_tokens_are_left_out_of_frequency_and_presence() -> None:
    asked = Asked(prompt=[5, 5, 6], sampled=[6, 7, 7], frequency=0.5, presence=1.0)
    logits = np.zeros(_VOCAB, np.float32)
    RowAdjustment(asked.opening()).apply(logits, asked.position)
    assert logits[[5, 6, 7, 8]].tolist() == [0, -1.5, -2, 0]


def test_ids_are_banned_until_min_tokens_are_sampled_and_no_longer() -> None:
    asked = Asked(prompt=[1, 2], banned=[3, 9], min_tokens=2)
    adjustment = RowAdjustment(asked.opening())
    banned = []
    for position in range(2, 6):
        logits = np.zeros(_VOCAB, np.float32)
        adjustment.apply(logits, position)
        banned.append(np.flatnonzero(np.isneginf(logits)).tolist())
    assert banned == [[3, 9], [3, 9], [], []]


def test_a_penalty_next_to_zero_leaves_a_row_that_can_be_drawn_from() -> None:
    asked = Asked(prompt=[0, 1], repetition=1e-38)
    logits = np.full(_VOCAB, 50, np.float32)
    RowAdjustment(asked.opening()).apply(logits, 2)
    assert np.isfinite(logits).all()
    assert logits[0] == logits.max() > 1e38


def test_each_row_has_its_own_state_and_one_without_any_is_left_alone() -> None:
    rng = np.random.default_rng(1)
    first, second = _random(rng), _random(rng)
    adjustments = Adjustments()
    adjustments.open([RowAdjustment(first.opening(4)), RowAdjustment(second.opening(2))])
    logits = np.stack([_logits(rng) for _ in range(4)])
    wanted = [logits[0].copy(), second.reference(logits[1]), logits[2].copy()]
    wanted.append(first.reference(logits[3]))
    # Row 7 was never opened; place 2 is nobody's.
    places, rows = np.array([0, 1, 3], np.int32), np.array([7, 2, 4], np.int32)
    positions = np.array([9, second.position, first.position], np.int32)
    adjustments.apply(logits, places, rows, positions)
    adjustments.count(rows, np.array([1, 1, 1], np.int32))
    for actual, expected in zip(logits, wanted, strict=True):
        _assert_matches(actual, expected.astype(np.float64))


@pytest.mark.parametrize("vocab_size", [64, 65, 71, 96])
def test_a_mask_s_bit_set_means_allowed(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    allowed = rng.random((3, vocab_size)) < 0.3
    bitmasks = np.zeros((3, -(-vocab_size // 32)), np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        bitmasks[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    # Bits past the vocabulary mean nothing.
    if vocab_size % 32:
        bitmasks[:, -1] |= np.uint32(1) << np.uint32(31)
    logits = np.zeros((5, vocab_size), np.float32)
    apply_masks(logits, np.array([4, 0, 2], np.int32), bitmasks.view(np.int32))
    assert (np.isfinite(logits[[4, 0, 2]]) == allowed).all()
    assert np.isfinite(logits[[1, 3]]).all()
