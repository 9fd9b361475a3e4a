"""What the scheduler says of itself."""

import numpy as np
import pytest

from tests.worker.scheduler.driver import Driver, engine_info
from worker.scheduler.integrity import IntegrityError
from worker.scheduler.scheduler import Scheduler
from worker.step import StepResult


def test_pages_are_free_cached_or_held_and_held_ones_go_with_the_last_request() -> None:
    driver = Driver(info=engine_info(num_pages=32), eos=())
    driver.submit([1] * 20, max_tokens=20)
    for _ in range(30):
        driver.turn()
        load = driver.scheduler.load()
        assert load.pages_free + load.pages_cached + load.pages_held == load.pages_total == 32
        assert (load.pages_held > 0) == bool(load.running or not driver.scheduler.is_idle)
    assert driver.scheduler.load().pages_held == 0


def test_counters_count() -> None:
    driver = Driver(eos=())
    driver.complete([1] * 21, max_tokens=4)
    driver.complete([1] * 21, max_tokens=4)
    load = driver.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (42, 20, 8)
    assert load.steps == len(driver.engine.plans) == 8


def test_the_device_is_idle_only_between_steps_of_live_requests() -> None:
    driver = Driver(eos=())
    scheduler = driver.scheduler

    def step(started_at: float, finished_at: float) -> None:
        plan = scheduler.plan(0.0)
        assert plan is not None
        tokens = np.ones(plan.num_rows, np.int32)
        faulty = np.zeros(plan.num_rows, np.bool_)
        scheduler.commit(plan, StepResult(tokens, faulty, started_at, finished_at), 0.0)

    driver.submit([1], max_tokens=2)
    step(10.0, 11.0)
    step(11.25, 12.0)
    assert scheduler.load().idle_s == 0.25
    driver.submit([1], max_tokens=2)
    step(20.0, 21.0)
    step(21.5, 22.0)
    assert scheduler.load().idle_s == 0.75


def test_steps_must_end_in_order() -> None:
    driver = Driver(eos=())
    driver.submit([1], max_tokens=5)
    scheduler = driver.scheduler
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    result = StepResult(np.ones(1, np.int32), np.zeros(1, np.bool_), 0.0, 0.0)
    with pytest.raises(AssertionError, match="in order"):
        scheduler.commit(second, result, 0.0)


def test_nothing_to_do_gives_no_plan_and_no_output() -> None:
    driver = Driver()
    scheduler: Scheduler = driver.scheduler
    assert scheduler.is_idle
    assert scheduler.plan(0.0) is None
    assert scheduler.drain_output(0.0) is None


def test_the_idle_check_tells_of_what_is_held() -> None:
    driver = Driver()
    driver.scheduler.check_idle()
    driver.submit([1])
    with pytest.raises(IntegrityError, match="live"):
        driver.scheduler.check_idle()
