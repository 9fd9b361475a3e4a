"""Requests that share prefixes: what is found, what must still be computed, and twins."""

import numpy as np
import pytest

from tests.fakes import checksum_model, echo_model
from tests.worker.scheduler.driver import EOS, VOCAB_SIZE, Driver, engine_info, solo_output
from worker.scheduler.config import SchedulerConfig

PROMPT = list(range(1, 25))


def test_a_repeated_prompt_is_found_up_to_the_page_before_its_last_token() -> None:
    driver = Driver(info=engine_info(page_size=4))
    first = driver.complete(PROMPT[:22])
    second = driver.complete(PROMPT[:22])
    assert first.finished.cached_tokens == 0
    assert second.finished.cached_tokens == 20
    assert second.started[0].cached_tokens == 20
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize(("page_size", "cached"), [(1, 23), (4, 20), (8, 16)])
def test_a_prompt_of_whole_pages_still_computes_a_token(page_size: int, cached: int) -> None:
    driver = Driver(info=engine_info(page_size=page_size))
    first = driver.complete(PROMPT)
    second = driver.complete(PROMPT)
    assert second.finished.cached_tokens == cached
    assert second.token_ids == first.token_ids
    assert driver.engine.plans[-1].extend_lens.min() >= 1


def test_what_a_request_sampled_is_reused_by_the_next_turn_of_a_chat() -> None:
    driver = Driver(info=engine_info(page_size=1), eos=())
    answer = driver.complete(PROMPT[:10], max_tokens=8)
    longer = PROMPT[:10] + answer.token_ids + [5, 6]
    second = driver.complete(longer, max_tokens=4)
    # The last sampled token was never an input, so its KV was never computed.
    assert second.finished.cached_tokens == 17
    assert second.token_ids == solo_output(checksum_model(VOCAB_SIZE), longer, 4, ())


def test_a_running_request_shares_its_prompt_already() -> None:
    driver = Driver(eos=())
    first = driver.submit(PROMPT, max_tokens=30)
    driver.turns(4)
    second = driver.submit(PROMPT, max_tokens=4)
    driver.turn()
    assert not driver.outcomes[first].ended
    driver.run()
    assert driver.outcomes[second].finished.cached_tokens == 20
    assert driver.tokens(second) == driver.tokens(first)[:4]


def test_different_salts_compute_everything_anew() -> None:
    driver = Driver()
    one = driver.submit(PROMPT, cache_salt="one")
    driver.run()
    other = driver.submit(PROMPT, cache_salt="other")
    driver.run()
    again = driver.submit(PROMPT, cache_salt="one")
    driver.run()
    assert driver.outcomes[other].finished.cached_tokens == 0
    assert driver.outcomes[again].finished.cached_tokens == 20
    assert driver.tokens(one) == driver.tokens(other) == driver.tokens(again)


def test_without_prefix_caching_nothing_is_kept() -> None:
    driver = Driver(config=SchedulerConfig(prefix_caching=False))
    first, second = driver.complete(PROMPT), driver.complete(PROMPT)
    assert second.finished.cached_tokens == 0
    assert second.token_ids == first.token_ids
    assert driver.scheduler.load().pages_cached == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_twin_prompts_in_one_step_come_out_right_after_evictions(
    page_size: int, overlap: bool
) -> None:
    info = engine_info(page_size=page_size, num_pages=480 // page_size, max_context=100)
    driver = Driver(info=info, model=echo_model(EOS), overlap=overlap)
    prompt = list(range(1, 41))
    twins = [driver.submit(prompt, max_tokens=50) for _ in range(8)]
    driver.turn()
    assert driver.engine.plans[0].num_rows == 8, "all in one step"
    rng = np.random.default_rng(0)
    fillers = {}
    for _ in range(20):
        filler = rng.integers(1, VOCAB_SIZE, 45).tolist()
        fillers[driver.submit(filler, max_tokens=50)] = filler
    driver.run()
    for uid in twins:
        assert driver.tokens(uid) == prompt
        assert driver.outcomes[uid].finished.cached_tokens <= 39
    for uid, filler in fillers.items():
        assert driver.tokens(uid) == filler
    assert driver.scheduler.load().pages_free < info.num_pages // 4, "evictions were forced"


@pytest.mark.parametrize("overlap", [True, False])
def test_twins_hold_one_copy_of_their_prompt(overlap: bool) -> None:
    driver = Driver(info=engine_info(page_size=4), eos=(), overlap=overlap)
    for _ in range(4):
        driver.submit(PROMPT, max_tokens=20)
    driver.turn()
    if overlap:
        assert driver.scheduler.load().pages_held == 4 * 6
    driver.turns(4)
    # Six pages of prompt for all, and one or two of its own for each one's output.
    assert driver.scheduler.load().pages_held <= 6 + 4 * 2
    driver.run()


def test_pages_of_a_twin_are_not_free_while_a_step_in_flight_reads_them() -> None:
    driver = Driver(info=engine_info(page_size=4), eos=(), overlap=True)
    driver.submit(PROMPT, max_tokens=20)
    driver.submit(PROMPT, max_tokens=20)
    driver.turn()
    driver.turn()
    # The prefill is committed, and the step in flight was planned with both copies.
    free_then = driver.scheduler.load().pages_free
    driver.turn()
    assert driver.scheduler.load().pages_free >= free_then + 6 - 2
    driver.run()


def test_flushing_drops_only_what_nobody_holds() -> None:
    driver = Driver(eos=())
    driver.complete([50] * 16, max_tokens=1)
    running = driver.submit(PROMPT, max_tokens=20)
    driver.turns(4)
    assert driver.scheduler.flush_cache() == 4
    assert driver.scheduler.flush_cache() == 0
    driver.run()
    expected = solo_output(checksum_model(VOCAB_SIZE), PROMPT, 20, ())
    assert driver.tokens(running) == expected
    assert driver.complete([50] * 16).finished.cached_tokens == 0


def test_pages_given_back_are_given_out_again_as_a_run() -> None:
    driver = Driver(config=SchedulerConfig(prefix_caching=False), overlap=False)
    for _ in range(3):
        driver.complete(PROMPT, max_tokens=1)
    for plan in driver.engine.plans:
        assert plan.page_ids.tolist() == [0, 1, 2, 3, 4, 5]
