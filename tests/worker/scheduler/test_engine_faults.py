"""A step that fails ends the requests in it; all others go on, and the cache stays clean."""

import pytest

from shared.errors import Code
from tests.fakes import checksum_model
from tests.worker.scheduler.driver import VOCAB_SIZE, Driver, engine_info, solo_output
from worker.scheduler.config import SchedulerConfig

PROMPT = list(range(1, 31))


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    return solo_output(checksum_model(VOCAB_SIZE), prompt, max_tokens, ())


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(eos=(), overlap=request.param)


@pytest.mark.parametrize("failure", ["lost", "garbage", "refused"])
def test_exactly_the_requests_of_the_step_end(driver: Driver, failure: str) -> None:
    in_it = [driver.submit([i + 1, 5], max_tokens=20) for i in range(2)]
    driver.turns(3)
    driver.engine.failures[len(driver.engine.plans)] = failure
    driver.turn()
    after = driver.submit([50, 51], max_tokens=5)
    driver.run()
    for uid in in_it:
        assert driver.outcomes[uid].failed.code is Code.INTERNAL
        assert driver.outcomes[uid].failed.message == failure
    assert driver.tokens(after) == alone([50, 51], 5)


@pytest.mark.parametrize("failure", ["lost", "garbage", "refused"])
def test_a_request_that_is_only_in_the_step_after_goes_on(failure: str) -> None:
    driver = Driver(eos=(), overlap=True)
    failing = driver.submit([1, 2], max_tokens=20)
    driver.engine.failures[0] = failure
    driver.turn()
    beside = driver.submit([3, 4], max_tokens=6)
    driver.run()
    assert driver.engine.plans[1].num_rows == 2, "both were in the step after"
    assert driver.outcomes[failing].failed.code is Code.INTERNAL
    assert driver.tokens(beside) == alone([3, 4], 6)


@pytest.mark.parametrize("failure", ["lost", "garbage", "refused"])
@pytest.mark.parametrize("failing_step", [0, 1, 2, 3])
def test_a_failed_step_does_not_poison_the_cache(failing_step: int, failure: str) -> None:
    config = SchedulerConfig(token_budget=8)
    driver = Driver(info=engine_info(page_size=1), config=config, eos=(), overlap=True)
    driver.submit(PROMPT, max_tokens=4)
    driver.engine.failures[failing_step] = failure
    driver.run()
    assert driver.outcomes[1].failed
    assert driver.complete(PROMPT, max_tokens=6).token_ids == alone(PROMPT, 6)


def test_a_step_whose_page_updates_are_lost_leaves_pages_of_others_alone() -> None:
    driver = Driver(info=engine_info(page_size=4, max_rows=2), eos=(), overlap=True)
    # Row 0 was owned by this one, whose pages are in the tree now.
    driver.complete(PROMPT, max_tokens=4)
    failing = driver.submit([60] * 9, max_tokens=10)
    step = len(driver.engine.plans)
    driver.engine.failures[step] = "lost"
    driver.turns(2)
    assert driver.engine.plans[step + 1].rows.tolist() == driver.engine.plans[step].rows.tolist()
    driver.run()
    assert driver.outcomes[failing].failed
    again = driver.complete(PROMPT, max_tokens=6)
    assert again.finished.cached_tokens == 28
    assert again.token_ids == alone(PROMPT, 6)


def test_a_row_that_is_not_finite_ends_alone(driver: Driver) -> None:
    good, bad = driver.submit([1, 2], max_tokens=6), driver.submit([3, 4], max_tokens=6)
    driver.engine.faulty.add((2, 1))
    driver.run()
    assert driver.tokens(good) == alone([1, 2], 6)
    assert driver.outcomes[bad].failed.code is Code.INTERNAL
    assert "not finite" in driver.outcomes[bad].failed.message
    assert len(driver.tokens(bad)) == 2


@pytest.mark.parametrize(("step", "cached"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 29)])
def test_nothing_reaches_the_cache_of_a_prefill_that_is_not_finite(step: int, cached: int) -> None:
    config = SchedulerConfig(token_budget=8)
    driver = Driver(info=engine_info(page_size=1), config=config, eos=(), overlap=True)
    driver.submit(PROMPT, max_tokens=4)
    driver.engine.faulty.add((step, 0))
    driver.run()
    assert driver.outcomes[1].failed
    again = driver.complete(PROMPT, max_tokens=6)
    # The fourth step completed the prefill; what came after it does not taint the prompt.
    assert again.finished.cached_tokens == cached
    assert again.token_ids == alone(PROMPT, 6)


def test_an_abort_before_the_fault_is_the_only_ending(driver: Driver) -> None:
    uid = driver.submit([1, 2], max_tokens=20)
    driver.engine.failures[3] = "garbage"
    while len(driver.engine.plans) < 3:
        driver.turn()
    driver.abort(uid)
    driver.run()
    assert driver.outcomes[uid].finished


def test_a_fault_while_the_newest_is_preempted_ends_both() -> None:
    info = engine_info(num_pages=16, page_size=4)
    for step in range(14):
        config = SchedulerConfig(headroom_tokens=0)
        driver = Driver(info=info, config=config, eos=(), overlap=True)
        driver.submit([1] * 20, max_tokens=30)
        driver.submit([2] * 20, max_tokens=30)
        driver.engine.failures[step] = "garbage"
        driver.run()
        for uid, prompt in ((1, [1] * 20), (2, [2] * 20)):
            (end,) = driver.outcomes[uid].ended
            tokens = driver.tokens(uid)
            assert tokens == alone(prompt, 30)[: len(tokens)], end
