"""Aborts at every point of a request's life: one ending, and every page comes back."""

import pytest

from shared.types import FinishReason
from tests.fakes import checksum_model
from tests.worker.scheduler.driver import VOCAB_SIZE, Driver, engine_info, solo_output
from worker.scheduler.config import SchedulerConfig

PROMPT = list(range(1, 41))


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def driver(request: pytest.FixtureRequest) -> Driver:
    config = SchedulerConfig(token_budget=16, max_running=2)
    return Driver(config=config, eos=(), overlap=request.param)


def test_abort_in_the_queue_ends_without_a_start(driver: Driver) -> None:
    for i in range(2):
        driver.submit([i + 1], max_tokens=4)
    driver.turn()
    queued = driver.submit(PROMPT)
    driver.abort(queued)
    driver.run()
    end = driver.outcomes[queued].finished
    assert (end.reason, end.completion_tokens) == (FinishReason.ABORTED, 0)
    assert driver.outcomes[queued].started == []


def test_abort_during_chunked_prefill_returns_all_pages(driver: Driver) -> None:
    uid = driver.submit(PROMPT)
    driver.turns(2)
    driver.abort(uid)
    driver.run()
    end = driver.outcomes[uid].finished
    assert (end.reason, end.completion_tokens) == (FinishReason.ABORTED, 0)


def test_what_an_aborted_prefill_left_in_the_cache_is_right(driver: Driver) -> None:
    driver.submit(PROMPT)
    driver.turns(2)
    driver.abort(1)
    driver.run()
    outcome = driver.complete(PROMPT)
    assert outcome.finished.cached_tokens >= 16
    assert outcome.token_ids == solo_output(checksum_model(VOCAB_SIZE), PROMPT, 8, ())


def test_abort_in_flight_reports_what_had_been_sampled_and_no_more(driver: Driver) -> None:
    uid = driver.submit([1, 2, 3], max_tokens=40)
    driver.turns(6)
    had = len(driver.tokens(uid))
    driver.abort(uid)
    driver.run()
    end = driver.outcomes[uid].finished
    assert (end.reason, end.completion_tokens) == (FinishReason.ABORTED, had)
    assert len(driver.tokens(uid)) == had > 0


def test_an_abort_frees_at_once_what_no_step_in_flight_holds(driver: Driver) -> None:
    uid = driver.submit([1, 2, 3], max_tokens=40)
    driver.turns(3)
    driver.abort(uid)
    load = driver.scheduler.load()
    assert load.running == 0
    assert (load.pages_held > 0) == driver.overlap
    driver.turn()
    assert driver.scheduler.load().pages_held == 0


def test_a_silent_abort_says_nothing(driver: Driver) -> None:
    running, queued = driver.submit([1, 2], max_tokens=40), 0
    driver.submit([3], max_tokens=6)
    driver.turn()
    queued = driver.submit([4], max_tokens=40)
    driver.abort(running, queued, report=False)
    driver.run()
    assert driver.outcomes[running].ended == driver.outcomes[queued].ended == []


def test_abort_of_an_unknown_or_ended_uid_is_no_error(driver: Driver) -> None:
    driver.abort(77)
    uid = driver.submit([1], max_tokens=2)
    driver.run()
    driver.abort(uid)
    driver.abort(uid, report=False)
    assert driver.outcomes[uid].finished.reason is FinishReason.LENGTH


def test_two_aborts_give_one_ending(driver: Driver) -> None:
    uid = driver.submit([1], max_tokens=20)
    driver.turns(3)
    driver.abort(uid, uid)
    driver.abort(uid)
    driver.run()
    assert driver.outcomes[uid].finished.reason is FinishReason.ABORTED


def test_the_next_owner_of_a_row_gets_nothing_of_the_step_in_flight() -> None:
    info = engine_info(max_rows=1, num_pages=16)
    driver = Driver(info=info, eos=(), overlap=True)
    first = driver.submit([1, 2, 3], max_tokens=40)
    driver.turns(3)
    driver.abort(first)
    second = driver.submit([7, 8], max_tokens=5)
    driver.run()
    assert driver.tokens(second) == solo_output(checksum_model(VOCAB_SIZE), [7, 8], 5, ())


def test_a_preempted_request_can_be_aborted_before_and_after_it_is_back_in_the_queue() -> None:
    for turns_after in range(4):
        info = engine_info(num_pages=16, page_size=4)
        driver = Driver(info=info, config=SchedulerConfig(headroom_tokens=0), eos=())
        old = driver.submit([1] * 20, max_tokens=40)
        new = driver.submit([2] * 20, max_tokens=40)
        seen = 0
        while driver.engine.plans[seen:][:1] == [] or 1 in driver.engine.plans[-1].rows:
            driver.turn()
            seen = len(driver.engine.plans) - 1
        driver.turns(turns_after)
        driver.abort(new)
        driver.run()
        assert driver.outcomes[new].finished.reason is FinishReason.ABORTED
        assert driver.tokens(old) == solo_output(checksum_model(VOCAB_SIZE), [1] * 20, 40, ())
