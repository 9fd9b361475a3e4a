"""The overlap order: a step is planned while the one before it has not told its tokens."""

from dataclasses import fields

import numpy as np
import pytest

from shared.types import FinishReason, SamplingParams
from tests.fakes import scripted_model
from tests.worker.scheduler.driver import EOS, Driver, engine_info
from worker.scheduler.config import SchedulerConfig
from worker.step import SamplingBatch, StepPlan


def mixed_outcomes(
    *, overlap: bool, max_running: int, prefix_caching: bool, budget: int, num_pages: int
) -> list[tuple[list[int], FinishReason]]:
    driver = Driver(
        info=engine_info(num_pages=num_pages, max_rows=16),
        config=SchedulerConfig(
            token_budget=budget,
            max_running=max_running,
            prefix_caching=prefix_caching,
            headroom_tokens=0,
        ),
        overlap=overlap,
        eos=(EOS, 1, 2),
    )
    rng = np.random.default_rng(7)
    stem = rng.integers(1, 90, 20).tolist()
    uids = []
    for i in range(64):
        prompt = stem[: rng.integers(0, 20)] + rng.integers(1, 90, rng.integers(1, 20)).tolist()
        uids.append(
            driver.submit(
                prompt,
                max_tokens=int(rng.integers(1, 25)),
                ignore_eos=i % 3 == 0,
                stop_token_ids=(5, 6) if i % 4 == 0 else (),
            )
        )
    driver.run()
    if num_pages == 16 and max_running > 1:
        assert driver.scheduler.load().preemptions > 0
    return [(driver.tokens(uid), driver.outcomes[uid].finished.reason) for uid in uids]


@pytest.fixture(scope="module")
def reference() -> list[tuple[list[int], FinishReason]]:
    """One request after another, with all the room there is."""
    outcomes = mixed_outcomes(
        overlap=False, max_running=1, prefix_caching=False, budget=10_000, num_pages=256
    )
    assert len({reason for _, reason in outcomes}) == 3
    return outcomes


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize(
    ("max_running", "prefix_caching", "budget", "num_pages"),
    [
        (1, True, 16, 16),
        (4, True, 16, 16),
        (4, False, 10_000, 16),
        (16, True, 10_000, 256),
        (16, False, 16, 256),
    ],
)
def test_neither_loop_nor_batch_nor_cache_nor_preemption_changes_an_output(
    reference: list[tuple[list[int], FinishReason]],
    overlap: bool,
    max_running: int,
    prefix_caching: bool,
    budget: int,
    num_pages: int,
) -> None:
    outcomes = mixed_outcomes(
        overlap=overlap,
        max_running=max_running,
        prefix_caching=prefix_caching,
        budget=budget,
        num_pages=num_pages,
    )
    assert outcomes == reference


def test_a_request_that_ends_by_eos_is_in_the_next_step_already_and_told_once() -> None:
    driver = Driver(model=scripted_model({9: [4, 5, EOS, 8, 8]}), overlap=True)
    uid = driver.submit([9, 1], max_tokens=20)
    driver.run()
    assert driver.tokens(uid) == [4, 5]
    end = driver.outcomes[uid].finished
    assert (end.reason, end.matched_token_id, end.completion_tokens) == (FinishReason.EOS, EOS, 3)
    # Prefill and two decode steps gave the three tokens; one more was in flight by then.
    assert len(driver.engine.plans) == 4


def test_its_row_and_pages_stay_until_that_step_is_over() -> None:
    driver = Driver(model=scripted_model({9: [4, EOS, 8]}), overlap=True)
    uid = driver.submit([9, 1], max_tokens=20)
    while not driver.outcomes[uid].ended:
        driver.turn()
    load = driver.scheduler.load()
    assert (load.running, load.pages_held) == (0, 1)
    assert not driver.scheduler.is_idle
    driver.turn()
    assert driver.scheduler.is_idle
    assert driver.scheduler.load().pages_held == 0


def test_a_request_whose_length_ends_with_the_token_in_flight_is_not_planned_again() -> None:
    driver = Driver(eos=(), overlap=True)
    driver.submit([1, 2, 3], max_tokens=4)
    driver.run()
    assert len(driver.engine.plans) == 4


@pytest.mark.parametrize("overlap", [True, False])
def test_one_token_is_given_by_the_prefill_step_alone(overlap: bool) -> None:
    driver = Driver(eos=(), overlap=overlap)
    outcome = driver.complete([1, 2, 3], max_tokens=1)
    assert len(outcome.token_ids) == 1
    assert outcome.finished.reason is FinishReason.LENGTH
    (plan,) = driver.engine.plans
    assert plan.write_rows.tolist() == [driver.info.max_rows]


def test_a_new_request_is_prefilled_beside_what_is_in_flight() -> None:
    driver = Driver(eos=(), overlap=True)
    driver.submit([1, 2, 3], max_tokens=10)
    driver.turns(2)
    driver.submit([4, 5, 6, 7], max_tokens=2)
    plan = driver.turn()
    assert plan is not None
    assert (plan.num_decode, plan.num_rows, plan.num_tokens) == (1, 2, 5)
    assert plan.prefill_token_ids.tolist() == [4, 5, 6, 7]
    driver.run()


def test_a_plan_stays_as_it_is_while_later_ones_are_made() -> None:
    driver = Driver(eos=())
    driver.submit([1, 2, 3], max_tokens=10)
    driver.submit([1, 2, 3, 4, 5], max_tokens=10)
    driver.turns(3)
    kept = driver.engine.plans[2]
    before = [array.copy() for array in _arrays(kept)]
    driver.run()
    for then, now in zip(before, _arrays(kept), strict=True):
        assert np.array_equal(then, now)


def test_a_plan_carries_each_rows_own_sampling_parameters() -> None:
    driver = Driver(eos=())
    params = [
        SamplingParams(temperature=0.5, top_k=7, top_p=0.25, seed=2**64 - 1),
        SamplingParams(temperature=0.0, top_p=0.5, seed=1),
        SamplingParams(temperature=2.0, top_k=1),
    ]
    for i, param in enumerate(params):
        driver.submit([i + 1], max_tokens=3, sampling=param)
    driver.run()
    for plan in driver.engine.plans:
        sampling = plan.sampling
        assert sampling.seeds.tolist() == [2**64 - 1, 1, 0]
        assert sampling.temperature.tolist() == [0.5, 0.0, 2.0]
        assert sampling.top_k.tolist() == [7, 0, 1]
        assert sampling.top_p.tolist() == [0.25, 0.5, 1.0]
        assert sampling.is_greedy.tolist() == [False, True, True]


def _arrays(plan: StepPlan) -> list[np.ndarray]:
    parts = [getattr(plan, field.name) for field in fields(StepPlan)]
    parts += [getattr(plan.sampling, field.name) for field in fields(SamplingBatch)]
    return [part for part in parts if isinstance(part, np.ndarray)]
