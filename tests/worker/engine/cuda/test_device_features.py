"""Adjusted logits, masks and log-probabilities on the device against the CPU's reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.engine.cuda.features import (
    MAX_ROWS,
    VOCAB_SIZE,
    Device,
    Reference,
    decode_plan,
    logprobs_plan,
    opening,
    random_masks,
)
from worker.engine.cuda.packing import pack
from worker.engine.cuda.sampling import FAULTY
from worker.engine.cuda.staging import MASK_NUMBER, align_words, padding_block, write_rows
from worker.engine.logprobs import token_logprobs
from worker.step import Int32Array, RowOpening, SamplingBatch, StepPlan

# The interpreter computes with numpy, and both sides of a choice: inf - inf is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS = np.array([5, 0, 9, 3, 7, 2, 11, 4], np.int32)
# Places of plan rows, by what they ask for.
ADJUSTED = np.array([0, 1, 3, 4, 6], np.int32)
MASKED = np.array([1, 5], np.int32)


def sampling(count: int, *, seed: int = 1, greedy: float = 0.2) -> SamplingBatch:
    rng = np.random.default_rng(seed)
    return SamplingBatch(
        temperature=rng.uniform(0.3, 1.5, count).astype(np.float32),
        top_k=rng.choice([0, 5, 50], count).astype(np.int32),
        top_p=rng.choice([1.0, 0.9, 0.5], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.05], count).astype(np.float32),
        seeds=rng.integers(0, 2**64, count, dtype=np.uint64),
        is_greedy=rng.random(count) < greedy,
    )


def model_logits(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, VOCAB_SIZE, generator=generator) * 2).bfloat16()


def openings(rng: np.random.Generator, prompt_len: int = 20) -> tuple[RowOpening, ...]:
    """One for each adjusted row: of each kind alone, and one of all of them."""
    known: list[int] = rng.integers(0, 40, prompt_len + 15).tolist()
    bias_ids = rng.permutation(VOCAB_SIZE)[:200].astype(np.int32)
    bias_values = rng.uniform(-100, 100, 200).astype(np.float32)
    allowed_ids = rng.permutation(VOCAB_SIZE)[:900].astype(np.int32)

    def penalised(one: RowOpening) -> RowOpening:
        return replace(one, frequency_penalty=0.7, presence_penalty=-1.3)

    def biased(one: RowOpening) -> RowOpening:
        return replace(one, bias_ids=bias_ids, bias_values=bias_values)

    def restricted(one: RowOpening) -> RowOpening:
        banned_ids = np.arange(30, dtype=np.int32)
        return replace(one, allowed_ids=allowed_ids, banned_ids=banned_ids, min_len=prompt_len + 17)

    repeating, *others, last = (opening(int(ROWS[i]), known, prompt_len) for i in ADJUSTED)
    return (
        replace(repeating, repetition_penalty=1.3),
        penalised(others[0]),
        biased(others[1]),
        restricted(others[2]),
        replace(restricted(biased(penalised(last))), repetition_penalty=0.8),
    )


def plan_of_step(step: int, rng: np.random.Generator) -> StepPlan:
    lens = np.full(len(ROWS), 35 + step, np.int32)
    plan = decode_plan(ROWS, lens, sampling(len(ROWS), seed=step))
    return replace(
        plan,
        openings=openings(rng) if step == 0 else (),
        adjusted=ADJUSTED,
        masked=MASKED if step % 2 else MASKED[:0],
    )


def test_tokens_of_some_steps_are_those_of_the_reference(device: torch.device) -> None:
    ours, theirs, rng = Device(device), Reference(), np.random.default_rng(0)
    same, steps = 0, 6
    for step in range(steps):
        plan, logits = plan_of_step(step, rng), model_logits(len(ROWS), seed=step)
        masks = random_masks(rng, len(plan.masked)) if len(plan.masked) else None
        expected = theirs.draw(plan, theirs.logits(plan, logits, masks))
        token_ids, _ = ours.step(plan, logits, masks)
        assert np.array_equal(ours.token_pool.cpu().numpy()[ROWS], token_ids)
        same += int((token_ids == expected).sum())
    # A device's logarithm differs in its last bits, which may decide between two that tie.
    assert same >= (1.0 if device.type == "cpu" else 0.95) * steps * len(ROWS)


def test_rows_with_nothing_but_a_mask_draw_what_it_leaves(device: torch.device) -> None:
    ours, rng = Device(device), np.random.default_rng(6)
    same, steps = 0, 6
    for step in range(steps):
        lens = np.full(len(ROWS), 35 + step, np.int32)
        plan = replace(decode_plan(ROWS, lens, sampling(len(ROWS), seed=step)), masked=MASKED)
        logits, masks = model_logits(len(ROWS), seed=step), random_masks(rng, len(MASKED))
        reference = Reference()
        expected = reference.draw(plan, reference.logits(plan, logits, masks))
        token_ids, _ = ours.step(plan, logits, masks)
        for mask, token_id in zip(masks, token_ids[MASKED].tolist(), strict=True):
            assert mask[token_id // 32] >> (token_id % 32) & 1
        assert np.array_equal(ours.token_pool.cpu().numpy()[ROWS], token_ids)
        same += int((token_ids == expected).sum())
    assert same >= (1.0 if device.type == "cpu" else 0.95) * steps * len(ROWS)


def test_adjusted_logits_are_those_of_the_reference(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    plan, logits = plan_of_step(0, rng), model_logits(len(ROWS), seed=3)
    expected = Reference().logits(plan, logits).numpy()[ADJUSTED]
    ours = Device(device)
    ours.step(plan, logits)
    found = ours.featured.last_adjusted(len(ADJUSTED)).cpu().numpy()
    assert np.array_equal(np.isneginf(found), np.isneginf(expected))
    finite = np.isfinite(expected)
    assert finite.any(axis=1).all()
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=1e-5)


def test_a_row_draws_the_same_alone_and_beside_others(device: torch.device) -> None:
    rng = np.random.default_rng(4)
    plan, logits = plan_of_step(0, rng), model_logits(len(ROWS), seed=4)
    together, _ = Device(device).step(plan, logits)
    for entry, place in enumerate(ADJUSTED.tolist()):
        one = slice(place, place + 1)
        batch = SamplingBatch(*(getattr(plan.sampling, f)[one] for f in SamplingBatch.__slots__))
        alone = replace(
            decode_plan(ROWS[one], plan.cached_lens[one] + 1, batch),
            openings=(plan.openings[entry],),
            adjusted=np.zeros(1, np.int32),
        )
        assert Device(device).step(alone, logits[one])[0] == together[place]


def test_an_opening_forgets_what_the_row_had_before(device: torch.device) -> None:
    used, rng = Device(device), np.random.default_rng(5)
    for step in range(2):
        plan = plan_of_step(step, rng)
        used.step(plan, model_logits(len(ROWS), seed=step), random_masks(rng, len(plan.masked)))
    # Each row has another kind of opening than before.
    old = plan_of_step(0, np.random.default_rng(6))
    rows = [one.row for one in old.openings]
    openings = tuple(
        replace(one, row=row) for one, row in zip(old.openings, rows[1:] + rows[:1], strict=True)
    )
    plan, logits = replace(old, openings=openings), model_logits(len(ROWS), seed=8)
    fresh = Device(device)
    assert np.array_equal(used.step(plan, logits)[0], fresh.step(plan, logits)[0])
    adjusted = [one.featured.last_adjusted(len(ADJUSTED)) for one in (used, fresh)]
    assert torch.equal(*adjusted)


def test_a_resumed_request_draws_as_if_it_had_not_been_interrupted(device: torch.device) -> None:
    rng = np.random.default_rng(6)
    known: list[int] = rng.integers(0, VOCAB_SIZE, 10).tolist()
    through, row = Device(device), np.array([6], np.int32)

    def plan(known: list[int], *, opens: bool) -> StepPlan:
        penalised = replace(
            opening(6, known, 10),
            repetition_penalty=1.2,
            frequency_penalty=0.9,
            presence_penalty=0.4,
        )
        base = decode_plan(row, np.array([len(known)], np.int32), sampling(1, greedy=1.0))
        openings = (penalised,) if opens else ()
        return replace(base, openings=openings, adjusted=np.zeros(1, np.int32))

    # The same logits again and again, so that penalties alone move the argmax.
    logits = model_logits(1, seed=6)
    for step in range(12):
        resumed, _ = Device(device).step(plan(known, opens=True), logits)
        token, _ = through.step(plan(known, opens=step == 0), logits)
        assert token == resumed
        known.append(int(token[0]))
    assert len(set(known[10:])) > 6


def test_a_banned_id_is_free_from_its_position_on(device: torch.device) -> None:
    ours, row = Device(device), np.zeros(1, np.int32)
    logits = model_logits(1, seed=7)
    best = int(logits[0].float().argmax())
    banned = replace(opening(0, [4, 5], 2), banned_ids=np.array([best], np.int32), min_len=4)
    tokens: list[Int32Array] = []
    for known in (2, 3, 4):
        base = decode_plan(row, np.array([known], np.int32), sampling(1, greedy=1.0))
        openings = (banned,) if known == 2 else ()
        tokens.append(ours.step(replace(base, openings=openings, adjusted=row), logits)[0])
    assert [int(token[0]) == best for token in tokens] == [False, False, True]


def test_logits_that_are_not_finite_stay_so_under_a_mask(device: torch.device) -> None:
    rng = np.random.default_rng(8)
    plan = replace(plan_of_step(1, rng), adjusted=MASKED[:0])
    logits = model_logits(len(ROWS), seed=9)
    logits[1, 3], logits[0, 5] = float("nan"), float("inf")
    masks = random_masks(rng, 2)
    # Allows not the one that is not a number.
    masks[0, 0] = 0
    token_ids, _ = Device(device).step(plan, logits, masks)
    assert token_ids[1] == token_ids[0] == FAULTY
    assert (token_ids[2:] >= 0).all()


@pytest.mark.parametrize("masked", [[], [4], [6]])
def test_logits_that_are_not_finite_stay_so_when_they_are_adjusted(
    masked: list[int], device: torch.device
) -> None:
    rng = np.random.default_rng(8)
    plan = replace(plan_of_step(0, rng), masked=np.array(masked, np.int32))
    logits = model_logits(len(ROWS), seed=9)
    # Of a row that allows some ids, and not this one.
    row = ADJUSTED[3]
    allowed = plan.openings[3].allowed_ids
    assert allowed is not None
    logits[row, np.setdiff1d(np.arange(VOCAB_SIZE), allowed)[0]] = float("nan")
    masks = np.full((len(masked), -(-VOCAB_SIZE // 32)), -1, np.int32)
    token_ids, _ = Device(device).step(plan, logits, masks if masked else None)
    assert token_ids[row] == FAULTY
    assert (np.delete(token_ids, row) >= 0).all()


def test_a_mask_that_allows_nothing_is_a_fault_of_an_adjusted_row_too(
    device: torch.device,
) -> None:
    rng = np.random.default_rng(9)
    plan = replace(plan_of_step(0, rng), masked=np.array([1, 5], np.int32))
    masks = random_masks(rng, 2)
    masks[0] = 0
    token_ids, _ = Device(device).step(plan, model_logits(len(ROWS), seed=10), masks)
    assert 1 in ADJUSTED
    assert token_ids[1] == FAULTY
    assert (np.delete(token_ids, 1) >= 0).all()


def test_a_mask_alone_needs_nothing_to_travel_with_the_plan() -> None:
    lens = np.full(len(ROWS), 35, np.int32)
    plan = replace(decode_plan(ROWS, lens, sampling(len(ROWS))), masked=MASKED)
    assert pack(plan, VOCAB_SIZE) is None


def test_a_row_block_forgets_the_masks_of_the_step_before() -> None:
    block = padding_block(MAX_ROWS, align_words(len(ROWS) + 1)).numpy()
    plan = decode_plan(ROWS, np.full(len(ROWS), 35, np.int32), sampling(len(ROWS)))
    for masked in ([0, 2], [], [1]):
        write_rows(block, replace(plan, masked=np.array(masked, np.int32)))
        numbers = np.zeros(block.shape[1], np.int32)
        numbers[masked] = 1 + np.arange(len(masked))
        assert np.array_equal(block[MASK_NUMBER], numbers)


def test_a_mask_that_allows_nothing_is_a_fault_of_its_row_alone(device: torch.device) -> None:
    plan = replace(plan_of_step(1, np.random.default_rng(9)), adjusted=MASKED[:0])
    masks = np.full((2, -(-VOCAB_SIZE // 32)), -1, np.int32)
    masks[0] = 0
    token_ids, _ = Device(device).step(plan, model_logits(len(ROWS), seed=10), masks)
    assert token_ids[MASKED[0]] == FAULTY
    assert (np.delete(token_ids, MASKED[0]) >= 0).all()


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_those_of_the_reference(num_top: int, device: torch.device) -> None:
    rng = np.random.default_rng(11)
    asked = [0, 2, 3, 5, 7]
    plan = replace(plan_of_step(0, rng), logprobs=logprobs_plan(asked, num_top))
    logits = model_logits(len(ROWS), seed=11)
    # Zeros of both signs, among the best: ties go to the lowest id.
    logits[2] -= 20
    logits[2, 100:1700:40] = 0.0
    logits[2, 120:1700:40] = -0.0
    # As a model may have for ids that no text has.
    logits[3, 500:] = float("-inf")
    token_ids, logprobs = Device(device).step(plan, logits)
    assert logprobs is not None
    assert logprobs.sampled is not None
    chosen = torch.from_numpy(token_ids[asked].astype(np.int64))
    expected = token_logprobs(logits[asked].float(), chosen, num_top)
    found = logprobs.sampled
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert np.array_equal(found.ranks, expected.ranks)
    assert np.array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


def test_prompt_logprobs_come_in_slices_and_in_order(device: torch.device) -> None:
    rng = np.random.default_rng(12)
    # More than a slice, which is as long as a step has rows.
    count = 2 * MAX_ROWS + 5
    table = model_logits(40, seed=12).to(device)
    inputs = np.sort(rng.permutation(40)[:count]).astype(np.int32)
    targets = rng.integers(0, VOCAB_SIZE, count).astype(np.int32)
    plan = decode_plan(ROWS, np.full(len(ROWS), 5, np.int32), sampling(len(ROWS)))
    asked = replace(
        logprobs_plan([], 0), prompt_inputs=inputs, prompt_targets=targets, num_prompt_top=3
    )
    plan = replace(plan, logprobs=asked)
    # The hidden state of a token is its place, by which its logits are looked up.
    places = torch.arange(40, device=device)
    found = Device(device).prompt(plan, places, lambda hidden: table.index_select(0, hidden))
    expected = token_logprobs(
        table.cpu()[inputs].float(), torch.from_numpy(targets.astype(np.int64)), 3
    )
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert np.array_equal(found.ranks, expected.ranks)
    assert np.array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)
