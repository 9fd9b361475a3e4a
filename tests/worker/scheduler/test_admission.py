"""What is refused, and in which order the rest gets its turn."""

import numpy as np
import pytest

from shared.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    QueueFullError,
)
from tests.worker.scheduler.driver import VOCAB_SIZE, Driver, engine_info
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import EngineInfo


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "said"),
    [
        ([], 1, "prompt", "at least one token"),
        ([1] * 64, 1, "prompt", "64"),
        ([1] * 10, 0, "max_tokens", "at least 1, got 0"),
        ([1] * 10, 55, "max_tokens", "64"),
        ([1, VOCAB_SIZE], 1, "prompt", str(VOCAB_SIZE)),
        ([-1], 1, "prompt", "-1"),
    ],
)
def test_what_can_never_run_is_refused_and_the_next_request_works(
    prompt: list[int], max_tokens: int, field: str, said: str
) -> None:
    driver = Driver()
    with pytest.raises(InvalidArgumentError, match=said) as refusal:
        driver.submit(prompt, max_tokens)
    assert refusal.value.field == field
    assert driver.complete([1, 2, 3]).finished


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="100") as refusal:
        Driver().submit([1], stop_token_ids=(5, 100))
    assert refusal.value.field == "stopping.stop_token_ids"


def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    driver = Driver()
    new = NewRequest(1, np.array([1], np.int32), 4, min_tokens=5)
    with pytest.raises(InvalidArgumentError) as refusal:
        driver.scheduler.add(new, 0.0)
    assert refusal.value.field == "stopping.min_tokens"


def test_a_prompt_and_output_that_just_fit_run_to_the_end() -> None:
    driver = Driver(eos=())
    assert len(driver.complete([1] * 63, max_tokens=1).token_ids) == 1
    assert len(driver.complete([1] * 10, max_tokens=54).token_ids) == 54


def test_a_live_uid_cannot_be_taken_again_and_the_first_is_unaffected() -> None:
    driver = Driver(eos=())
    uid = driver.submit([1, 2, 3], max_tokens=5)
    with pytest.raises(AlreadyExistsError):
        driver.submit([4], uid=uid)
    driver.run()
    assert len(driver.tokens(uid)) == 5
    driver.submit([4], uid=uid)
    driver.run()


def test_the_queue_takes_what_can_run_and_as_many_as_may_wait() -> None:
    config = SchedulerConfig(max_running=4, max_waiting=4, retry_after_ms=700)
    driver = Driver(config=config, eos=())
    for i in range(8):
        driver.submit([i + 1])
    for _ in range(4):
        with pytest.raises(QueueFullError, match="limit is 4") as refusal:
            driver.submit([9])
        assert refusal.value.retry_after_ms == 700
    driver.turn()
    assert driver.scheduler.load().running == 4
    with pytest.raises(QueueFullError):
        driver.submit([9])
    driver.run()
    assert driver.complete([9]).finished


def test_no_more_run_than_allowed() -> None:
    driver = Driver(config=SchedulerConfig(max_running=3), eos=())
    for i in range(7):
        driver.submit([i + 1], max_tokens=3 + i)
    while not driver.scheduler.is_idle:
        driver.turn()
        assert driver.scheduler.load().running <= 3
    assert max(plan.num_rows for plan in driver.engine.plans) == 3


def test_equals_are_served_in_order_of_arrival_and_know_their_place() -> None:
    driver = Driver(config=SchedulerConfig(max_running=1), overlap=False)
    uids = [driver.submit([i + 1]) for i in range(4)]
    driver.run()
    started = [driver.outcomes[uid].started[0] for uid in uids]
    assert [start.queue_position for start in started] == [0, 1, 2, 3]
    waits = [start.queue_s for start in started]
    assert waits == sorted(waits)


def test_a_higher_priority_leaves_the_queue_earlier() -> None:
    driver = Driver(config=SchedulerConfig(max_running=1), overlap=False)
    driver.submit([1])
    driver.turn()
    low, high = driver.submit([2], priority=-1), driver.submit([3], priority=1)
    normal = driver.submit([4])
    driver.run()
    start = {uid: driver.outcomes[uid].started[0] for uid in (low, high, normal)}
    assert start[high].queue_s < start[normal].queue_s < start[low].queue_s
    assert [start[uid].queue_position for uid in (low, high, normal)] == [0, 0, 1]


def test_a_large_request_at_the_front_is_not_passed_by_small_ones() -> None:
    driver = Driver(info=engine_info(num_pages=16, page_size=4), eos=(), overlap=False)
    driver.submit([1] * 40, max_tokens=8)
    driver.turn()
    large, small = driver.submit([2] * 40, max_tokens=2), driver.submit([3], max_tokens=2)
    driver.run()
    assert driver.outcomes[large].started[0].queue_s <= driver.outcomes[small].started[0].queue_s


@pytest.mark.parametrize(("headroom_tokens", "num_left"), [(0, 1), (4, 1), (5, 2), (16, 4)])
def test_an_admission_leaves_running_requests_pages_to_grow(
    headroom_tokens: int, num_left: int
) -> None:
    for num_pages, is_admitted in ((6 - num_left, True), (7 - num_left, False)):
        config = SchedulerConfig(headroom_tokens=headroom_tokens)
        driver = Driver(
            info=engine_info(num_pages=16, page_size=4), config=config, eos=(), overlap=False
        )
        driver.submit([1] * 39, max_tokens=20)
        driver.turn()
        assert driver.scheduler.load().pages_free == 6
        uid = driver.submit([2] * (4 * num_pages), max_tokens=2)
        driver.turn()
        assert bool(driver.outcomes[uid].started) is is_admitted


def test_an_engine_that_cannot_hold_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one context of 64"):
        Scheduler(SchedulerConfig(), EngineInfo(15, 4, 8, 64, 10), ())
    with pytest.raises(ValueError, match="power of two"):
        Scheduler(SchedulerConfig(), EngineInfo(64, 3, 8, 64, 10), ())


def test_a_senseless_limit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        SchedulerConfig(token_budget=0)
    with pytest.raises(ValueError, match="max_running"):
        SchedulerConfig(max_running=0)
    with pytest.raises(ValueError, match="max_waiting must not be negative, got -1"):
        SchedulerConfig(max_waiting=-1)
