"""The reference sampler: exact in distribution and support, and blind to batch mates."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from shared.types import SamplingParams
from tests.worker.engine.plans import sampling_batch
from worker.engine.adjustments import RowAdjustment
from worker.engine.sampling import gumbel, noise_bits, sample
from worker.step import RowOpening

_VOCAB = 500
_DRAWS = 20_000
_MANY_DRAWS = 100_000


def _logits(seed: int, size: int = _VOCAB, scale: float = 3.0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(0, scale, size).astype(np.float32))


def _draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> NDArray[np.int64]:
    """Draws at `count` positions of one request."""
    batch = sampling_batch([params] * count)
    positions = np.arange(count, dtype=np.int32)
    token_ids, faulty = sample(logits.expand(count, -1), positions, batch)
    assert not faulty.any()
    return token_ids.numpy()


def _softmax(logits: torch.Tensor, temperature: float) -> NDArray[np.float64]:
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def _reference_support(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """By the definitions of the sampler's docstring, in float64 and by sorting."""
    probabilities = _softmax(logits, temperature)
    values = logits.double().numpy()
    kept = np.ones(len(values), np.bool_)
    if 0 < top_k < len(values):
        kept &= values >= np.sort(values)[-top_k]
    if top_p < 1.0:
        renormalised = np.where(kept, probabilities, 0) / probabilities[kept].sum()
        order = np.argsort(-renormalised, kind="stable")
        mass = np.cumsum(renormalised[order])
        last = order[np.searchsorted(mass, top_p)]
        kept &= values >= values[last]
    kept &= probabilities >= min_p * probabilities.max()
    return set(np.flatnonzero(kept).tolist())


def _assert_follows(draws: NDArray[np.int64], probabilities: NDArray[np.float64]) -> None:
    """A chi-square test over tokens that are expected often enough, the rest as one."""
    expected = probabilities * len(draws)
    counts = np.bincount(draws, minlength=len(probabilities)).astype(float)
    often = expected >= 10
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    if wanted[-1] < 1e-9:
        assert observed[-1] == 0
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = _logits(1)
    draws = _draw_many(logits, SamplingParams(temperature=temperature, seed=7), _DRAWS)
    _assert_follows(draws, _softmax(logits, temperature))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(10, 1.0, 0.0), (0, 0.8, 0.0), (50, 0.6, 0.0), (0, 1.0, 0.1), (40, 0.9, 0.05)],
)
def test_filtered_draws_follow_the_renormalised_rest_and_nothing_else(
    top_k: int, top_p: float, min_p: float
) -> None:
    logits = _logits(2)
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
    draws = _draw_many(logits, params, _DRAWS)
    support = _reference_support(logits, 1.3, top_k, top_p, min_p)
    assert set(draws.tolist()) <= support
    probabilities = _softmax(logits, 1.3)
    outside = np.setdiff1d(np.arange(_VOCAB), list(support))
    probabilities[outside] = 0
    _assert_follows(draws, probabilities / probabilities.sum())


def test_a_hundred_thousand_draws_follow_the_softmax_of_adjusted_logits() -> None:
    logits = _logits(9, size=60)
    adjusted = logits.numpy().copy()
    asked = RowOpening(
        row=0,
        token_ids=np.array([1, 2, 3, 3, 4], np.int32),
        prompt_len=2,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        bias_ids=np.array([7, 50], np.int32),
        bias_values=np.array([2.0, -1.0], np.float32),
        allowed_ids=np.arange(0, 60, 2, dtype=np.int32),
        banned_ids=np.array([10], np.int32),
        min_len=9,
    )
    RowAdjustment(asked).apply(adjusted, 5)
    params = SamplingParams(temperature=1.5, seed=8)
    draws = _draw_many(torch.from_numpy(adjusted), params, _MANY_DRAWS)
    _assert_follows(draws, _softmax(torch.from_numpy(adjusted), 1.5))


@pytest.mark.parametrize("seed", range(40))
def test_support_is_exactly_the_definition_s(seed: int) -> None:
    generator = np.random.default_rng(seed)
    # Few distinct values, so that ties straddle the borders.
    logits = torch.from_numpy(generator.integers(0, 6, 24).astype(np.float32))
    # Not 1, which is an argmax.
    top_k = int(generator.choice([0, *range(2, 12)]))
    top_p = float(np.float32(generator.choice([0.1, 0.5, 0.75, 0.9, 1.0])))
    min_p = float(np.float32(generator.choice([0.0, 0.01, 0.2])))
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    draws = set(_draw_many(logits, params, 3000).tolist())
    assert draws == _reference_support(logits, 2.0, top_k, top_p, min_p)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97, 0.999999])
def test_a_nucleus_larger_than_the_quick_path_is_still_exact(top_p: float) -> None:
    logits = _logits(5, size=20_000, scale=0.5)
    batch = SamplingParams(temperature=1.0, top_p=top_p, seed=11)
    draws = set(_draw_many(logits, batch, 300).tolist())
    assert draws <= _reference_support(logits, 1.0, 0, float(np.float32(top_p)), 0.0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, top_p=0.3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=1e-30, seed=5),
    ],
)
def test_greedy_in_every_form_takes_the_likeliest_and_of_ties_the_lowest_id(
    params: SamplingParams,
) -> None:
    logits = _logits(8)
    logits[[400, 37]] = float(logits.max()) + 1
    batch = sampling_batch([params] * 20)
    token_ids, _ = sample(logits.expand(20, -1), np.arange(20, dtype=np.int32), batch)
    if params.is_greedy:
        assert set(token_ids.tolist()) == {37}
    else:
        assert set(token_ids.tolist()) == {37, 400}


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    rows = torch.stack([_logits(seed) for seed in range(6)])
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=20, seed=2),
        SamplingParams(temperature=1.4, top_p=0.7, seed=2**63 + 5),
        SamplingParams(temperature=1.0, min_p=0.02, seed=1),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.5, min_p=0.1, seed=4),
    ]
    positions = np.array([5, 9, 2, 1000, 5, 0], np.int32)
    together, _ = sample(rows, positions, sampling_batch(params))
    backwards, _ = sample(rows.flip(0), positions[::-1].copy(), sampling_batch(params[::-1]))
    alone = [
        sample(rows[i : i + 1], positions[i : i + 1], sampling_batch([params[i]]))[0].item()
        for i in range(6)
    ]
    assert together.tolist() == alone == backwards.flip(0).tolist()


def test_other_seeds_and_other_positions_draw_otherwise() -> None:
    logits = torch.zeros(_VOCAB)
    one = _draw_many(logits, SamplingParams(seed=1), 200)
    other = _draw_many(logits, SamplingParams(seed=1 + 2**32), 200)
    assert (one != other).mean() > 0.9
    assert len(set(one.tolist())) > 100


def test_rows_that_are_not_finite_are_faulty_and_disturb_no_other() -> None:
    rows = torch.stack([_logits(seed) for seed in range(5)])
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    batch = sampling_batch([*params, SamplingParams(temperature=0.0)])
    positions = np.zeros(5, np.int32)
    healthy, _ = sample(rows, positions, batch)
    broken = rows.clone()
    broken[0, 17] = float("nan")
    broken[2] = float("-inf")
    broken[4, 3] = float("inf")
    token_ids, faulty = sample(broken, positions, batch)
    assert faulty.tolist() == [True, False, True, False, True]
    assert token_ids[[1, 3]].tolist() == healthy[[1, 3]].tolist()


def test_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.zeros(8)
    logits[2:] = float("-inf")
    assert set(_draw_many(logits, SamplingParams(temperature=1.0, seed=3), 200).tolist()) == {0, 1}


def test_the_hash_is_the_one_that_is_written_down() -> None:
    """Computed with numpy's wrapping uint32, which shares no code with the sampler."""

    def mix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
        h = h ^ (h >> np.uint32(16))
        h = h * np.uint32(0x85EBCA6B)
        h = h ^ (h >> np.uint32(13))
        h = h * np.uint32(0xC2B2AE35)
        return np.asarray(h ^ (h >> np.uint32(16)))

    def words(*values: int) -> NDArray[np.uint32]:
        return np.array(values, np.uint64).astype(np.uint32)

    seed, position = 0xDEADBEEF12345678, 4_000_000_000
    tokens = words(0, 1, 2, 49151, 151935)
    low, high = words(seed & 0xFFFFFFFF), words(seed >> 32)
    stream = mix(mix(low) + np.uint32(0x9E3779B9) + high)
    stream = mix(stream + words(position) * np.uint32(0x9E3779B1))
    expected = mix(tokens * np.uint32(0x9E3779B1) + stream)
    actual = noise_bits(seed, position, tokens)
    assert actual.tolist() == expected.tolist()


def test_noise_is_finite_for_every_extreme_of_the_hash() -> None:
    noise = gumbel(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32))
    assert torch.isfinite(noise).all()
    # Smaller hashes are likelier winners.
    assert (noise[:-1] >= noise[1:]).all()


def test_hashed_bits_are_uniform_over_tokens_and_over_positions() -> None:
    five = np.array([5], np.uint32)
    over_tokens = noise_bits(1, 2, np.arange(100_000, dtype=np.uint32))
    over_positions = np.concatenate([noise_bits(1, p, five) for p in range(3000)])
    for bits in (over_tokens, over_positions):
        counts = np.bincount(bits >> 26, minlength=64)
        assert stats.chisquare(counts).pvalue > 1e-4
