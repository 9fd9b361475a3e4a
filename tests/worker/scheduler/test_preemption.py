"""When pages run out: the newest gives way, comes back first, and nobody can tell."""

import pytest

from tests.fakes import checksum_model, scripted_model
from tests.worker.scheduler.driver import EOS, VOCAB_SIZE, Driver, engine_info, solo_output
from worker.scheduler.config import Policy, SchedulerConfig


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tight_driver(overlap: bool, **config: object) -> Driver:
    """Sixteen pages of four tokens: just one whole context."""
    settings = SchedulerConfig(headroom_tokens=0, **config)  # type: ignore[arg-type]
    info = engine_info(num_pages=16, page_size=4)
    return Driver(info=info, config=settings, eos=(), overlap=overlap)


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    return solo_output(checksum_model(VOCAB_SIZE), prompt, max_tokens, ())


def test_the_newest_gives_way_and_both_outputs_are_what_they_would_be_alone(
    overlap: bool,
) -> None:
    driver = tight_driver(overlap)
    old = driver.submit([1] * 20, max_tokens=30)
    new = driver.submit([2] * 20, max_tokens=30)
    driver.run()
    assert driver.scheduler.load().preemptions > 0
    assert driver.tokens(old) == alone([1] * 20, 30)
    assert driver.tokens(new) == alone([2] * 20, 30)
    assert driver.outcomes[old].finished.decode_s < driver.outcomes[new].finished.decode_s


def test_of_several_only_the_newest_gives_way(overlap: bool) -> None:
    driver = tight_driver(overlap)
    uids = [driver.submit([i + 1] * 9, max_tokens=24) for i in range(3)]
    driver.run()
    assert driver.scheduler.load().preemptions == 1
    decode_s = [driver.outcomes[uid].finished.decode_s for uid in uids]
    assert decode_s[2] > max(decode_s[0], decode_s[1]) + 1


def test_nobody_is_preempted_for_pages_that_come_with_the_step_in_flight() -> None:
    # The three hold all pages after the first decode step. The second ends with the token of
    # that step, but is in the one after, for which the first then needs another page.
    model = scripted_model({1: [5], 2: [5, EOS], 3: [5]})
    info = engine_info(num_pages=18, page_size=4)
    driver = Driver(info=info, config=SchedulerConfig(headroom_tokens=0), model=model)
    for i, length in enumerate((18, 20, 24)):
        driver.submit([i + 1] * length, max_tokens=12)
    driver.turns(3)
    assert driver.scheduler.load().pages_held == 18
    plan = driver.turn()
    assert plan is not None
    assert plan.cached_lens.tolist() == [26], "the first waits a step, the third goes on"
    driver.run()
    assert driver.scheduler.load().preemptions == 0


def test_a_resumed_request_starts_once_and_keeps_its_first_cached_tokens(overlap: bool) -> None:
    driver = tight_driver(overlap)
    driver.submit([1] * 20, max_tokens=30)
    new = driver.submit([2] * 20, max_tokens=30)
    driver.run()
    assert len(driver.outcomes[new].started) == 1
    assert driver.outcomes[new].started[0].cached_tokens == 0
    assert driver.outcomes[new].finished.cached_tokens == 0
    load = driver.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (40, 0, 60)


def test_a_preempted_request_resumes_before_those_that_wait(overlap: bool) -> None:
    driver = tight_driver(overlap)
    driver.submit([1] * 20, max_tokens=30)
    preempted = driver.submit([2] * 20, max_tokens=30)
    waiting = driver.submit([3] * 20, max_tokens=2)
    driver.run()
    assert driver.scheduler.load().preemptions > 0
    ends = driver.outcomes[preempted].finished
    assert driver.outcomes[waiting].started[0].queue_s > ends.queue_s
    assert driver.tokens(waiting) == alone([3] * 20, 2)


def test_the_lower_priority_gives_way_though_it_came_first(overlap: bool) -> None:
    driver = tight_driver(overlap)
    low = driver.submit([1] * 20, max_tokens=30, priority=-1)
    driver.turn()
    high = driver.submit([2] * 20, max_tokens=30)
    driver.run()
    assert driver.scheduler.load().preemptions > 0
    assert driver.outcomes[high].finished.decode_s == 29
    assert driver.tokens(low) == alone([1] * 20, 30)
    assert driver.tokens(high) == alone([2] * 20, 30)


def test_a_victim_in_flight_keeps_the_token_of_that_step() -> None:
    driver = tight_driver(overlap=True)
    driver.submit([1] * 20, max_tokens=30)
    victim = driver.submit([2] * 20, max_tokens=30)
    before, plan = 0, None
    while driver.scheduler.load().preemptions == 0:
        before = len(driver.tokens(victim))
        plan = driver.turn()
    assert len(driver.tokens(victim)) == before + 1
    assert plan is None or plan.num_rows < 2, "the victim is planned no more"
    driver.run()
    assert driver.tokens(victim) == alone([2] * 20, 30)


def test_a_victim_whose_first_token_is_in_flight_was_still_prefilled_then() -> None:
    driver = tight_driver(overlap=True)
    driver.submit([1] * 40, max_tokens=20)
    driver.turns(4)
    # Prefilled in the next turn; in the one after both need a page, and one is left.
    victim = driver.submit([2] * 16, max_tokens=4)
    driver.turns(2)
    assert driver.scheduler.load().preemptions == 1
    assert len(driver.tokens(victim)) == 1
    driver.run()
    assert driver.outcomes[victim].finished.prefill_s == 1


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_many_requests_of_nearly_a_whole_context_all_get_through(
    overlap: bool, policy: Policy, prefix_caching: bool
) -> None:
    driver = tight_driver(overlap, policy=policy, prefix_caching=prefix_caching, token_budget=8)
    uids = [driver.submit([i + 1] * 9, max_tokens=55) for i in range(8)]
    driver.run(most_turns=4000)
    assert driver.scheduler.load().preemptions > 0
    for i, uid in enumerate(uids):
        assert driver.tokens(uid) == alone([i + 1] * 9, 55)


def test_what_is_cached_goes_before_anyone_is_preempted(overlap: bool) -> None:
    driver = tight_driver(overlap)
    driver.complete([9] * 30, max_tokens=10)
    assert driver.scheduler.load().pages_cached > 8
    driver.submit([1] * 20, max_tokens=40)
    driver.run()
    assert driver.scheduler.load().preemptions == 0


def test_headroom_keeps_a_request_out_that_would_be_preempted_at_once(overlap: bool) -> None:
    info = engine_info(num_pages=16, page_size=4)
    driver = Driver(info=info, config=SchedulerConfig(headroom_tokens=40), eos=(), overlap=overlap)
    driver.submit([1] * 20, max_tokens=30)
    driver.submit([2] * 20, max_tokens=30)
    driver.run()
    assert driver.scheduler.load().preemptions == 0
