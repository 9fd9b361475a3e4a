"""Deadlines fail a request, time limits finish it, queued or running."""

import pytest

from shared.errors import Code
from shared.types import FinishReason
from tests.worker.scheduler.driver import Driver
from worker.scheduler.config import SchedulerConfig


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(config=SchedulerConfig(max_running=1), eos=(), overlap=request.param)


def test_a_deadline_fails_a_running_request(driver: Driver) -> None:
    uid = driver.submit([1], max_tokens=60, deadline=driver.now + 10)
    driver.run()
    assert driver.outcomes[uid].failed.code is Code.DEADLINE_EXCEEDED
    assert 0 < len(driver.tokens(uid)) < 12


def test_a_deadline_fails_a_queued_request(driver: Driver) -> None:
    running = driver.submit([1], max_tokens=30)
    queued = driver.submit([2], deadline=driver.now + 10)
    driver.run()
    assert driver.outcomes[queued].failed.code is Code.DEADLINE_EXCEEDED
    assert driver.outcomes[queued].started == []
    assert len(driver.tokens(running)) == 30


def test_a_time_limit_finishes_a_running_request_with_its_usage(driver: Driver) -> None:
    uid = driver.submit([1], max_tokens=60, time_limit=driver.now + 10)
    driver.run()
    end = driver.outcomes[uid].finished
    assert end.reason is FinishReason.TIME_LIMIT
    assert end.completion_tokens == len(driver.tokens(uid)) > 0


def test_a_time_limit_finishes_a_queued_request_without_tokens(driver: Driver) -> None:
    driver.submit([1], max_tokens=30)
    queued = driver.submit([2], time_limit=driver.now + 10)
    driver.run()
    end = driver.outcomes[queued].finished
    assert (end.reason, end.completion_tokens) == (FinishReason.TIME_LIMIT, 0)
    assert end.queue_s == 10


def test_of_both_the_earlier_counts_and_of_equals_the_deadline(driver: Driver) -> None:
    now = driver.now
    limit_first = driver.submit([1], 60, time_limit=now + 5, deadline=now + 9)
    driver.run()
    assert driver.outcomes[limit_first].finished.reason is FinishReason.TIME_LIMIT
    now = driver.now
    both = driver.submit([1], 60, time_limit=now + 5, deadline=now + 5)
    driver.run()
    assert driver.outcomes[both].failed.code is Code.DEADLINE_EXCEEDED


def test_a_request_that_is_done_in_time_is_not_touched(driver: Driver) -> None:
    uid = driver.submit([1], max_tokens=3, deadline=driver.now + 10, time_limit=driver.now + 9)
    driver.run()
    driver.turns(20)
    assert driver.outcomes[uid].finished.reason is FinishReason.LENGTH
