"""Turns of the waiting queue among clients, and requests that could not begin in time."""

import random
from collections import Counter

import numpy as np
import pytest

from shared.errors import QueueFullError
from tests.worker.scheduler.driver import Driver, Outcome, engine_info
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig


def one_at_a_time() -> Driver:
    return Driver(config=SchedulerConfig(max_running=1), eos=(), overlap=False)


def starts(driver: Driver) -> dict[int, float]:
    """When each request began, by its uid."""
    began = {}
    for uid, outcome in driver.outcomes.items():
        if outcome.started:
            began[uid] = outcome.started[0].queue_s
    return began


def test_one_request_does_not_wait_for_another_clients_thousand() -> None:
    driver = one_at_a_time()
    many = [driver.submit([1, 2], 2, client="greedy") for _ in range(1000)]
    driver.turn()
    alone = driver.submit([3, 4], 2, client="modest")
    while not driver.outcomes[alone].ended:
        driver.turn()
    assert sum(bool(driver.outcomes[uid].started) for uid in many) <= 3
    assert driver.outcomes[alone].started[0].queue_position == 1
    driver.abort(*many)


def test_clients_share_by_tokens_whatever_the_size_of_their_requests() -> None:
    driver = one_at_a_time()
    short = [driver.submit([1] * 4, 4, client="short") for _ in range(200)]
    long = [driver.submit([2] * 16, 16, client="long") for _ in range(200)]
    while sum(len(driver.tokens(uid)) for uid in long) < 320:
        driver.turn()
    served = [sum(len(driver.tokens(uid)) for uid in uids) for uids in (short, long)]
    assert 0.9 <= served[0] / served[1] <= 1.1
    driver.abort(*short, *long)


def test_a_clients_own_requests_keep_their_order() -> None:
    driver = one_at_a_time()
    rng = random.Random(1)
    by_client: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for _ in range(60):
        client = rng.choice("abc")
        uid = driver.submit([1] * rng.randint(1, 9), rng.randint(1, 9), client=client)
        by_client[client].append(uid)
    order: list[int] = []
    while not driver.scheduler.is_idle:
        driver.turn()
        order += [uid for uid in starts(driver) if uid not in order]
    for uids in by_client.values():
        assert [uid for uid in order if uid in uids] == uids


def test_a_higher_priority_goes_before_any_clients_share() -> None:
    driver = one_at_a_time()
    driver.submit([1], client="first")
    driver.turn()
    low = driver.submit([2], client="idle until now")
    high = [driver.submit([3], client="busy", priority=1) for _ in range(3)]
    driver.run()
    began = starts(driver)
    assert all(began[uid] < began[low] for uid in high)


def test_a_client_that_comes_back_has_saved_up_no_turns() -> None:
    driver = one_at_a_time()
    busy = [driver.submit([1], 1, client="busy") for _ in range(300)]
    driver.turns(200)
    back = [driver.submit([2], 1, client="back") for _ in range(50)]
    before = len([uid for uid in busy if driver.outcomes[uid].started])
    while sum(bool(driver.outcomes[uid].started) for uid in back) < 20:
        driver.turn()
    served = sum(bool(driver.outcomes[uid].started) for uid in busy) - before
    assert 18 <= served <= 22
    driver.abort(*busy, *back)


def test_ever_new_names_do_not_starve_an_old_client() -> None:
    driver = one_at_a_time()
    for _ in range(2):
        driver.submit([1] * 4, 4, client="old")
    driver.submit([9], 1, client="another")
    last = driver.submit([1] * 4, 4, client="old")
    for number in range(2000):
        driver.submit([2], 1, client=f"new {number}")
        driver.turn()
        if driver.outcomes[last].ended:
            break
    assert driver.outcomes[last].ended
    assert number < 200
    driver.abort(*driver.outcomes)


def test_a_preempted_request_is_ahead_of_every_client() -> None:
    driver = Driver(
        info=engine_info(num_pages=16, page_size=4),
        config=SchedulerConfig(headroom_tokens=0, max_running=3),
        eos=(),
        overlap=False,
    )
    running = [driver.submit([n] * 12, 40, client="running") for n in (1, 2, 3)]
    driver.turns(3)
    waiting = [driver.submit([n] * 4, 4, client="waiting") for n in (4, 5, 6, 7)]
    while not driver.scheduler.load().preemptions:
        driver.turn()
    preempted, tokens_before = running[-1], len(driver.tokens(running[-1]))
    assert 0 < tokens_before < len(driver.tokens(running[0]))
    while len(driver.tokens(preempted)) == tokens_before:
        assert not starts(driver).keys() & set(waiting), "a client's turn came first"
        driver.turn()
    driver.run()
    assert starts(driver).keys() >= set(waiting)
    assert all(len(driver.tokens(uid)) == 40 for uid in running)


def test_a_held_request_is_passed_over_and_then_takes_the_place_in_which_it_came() -> None:
    driver = one_at_a_time()
    running = driver.submit([1], 4, client="a")
    driver.turn()
    held = NewRequest(1000, np.array([2], np.int32), 1, client="a", arrived_at=driver.now)
    driver.scheduler.add(held, driver.now, held=True)
    driver.outcomes[held.uid] = Outcome()
    second = driver.submit([3], 1, client="a")
    third = driver.submit([4], 1, client="a")
    while not driver.outcomes[second].started:
        driver.turn()
    assert driver.outcomes[running].ended
    assert not driver.outcomes[held.uid].started
    driver.scheduler.release(held.uid)
    driver.turn()
    assert driver.outcomes[held.uid].started
    assert not driver.outcomes[third].started
    driver.run()


def test_random_clients_leave_nothing_behind_and_nobody_out() -> None:
    rng = random.Random(7)
    driver = Driver(config=SchedulerConfig(max_running=4), eos=(), overlap=True)
    live: list[int] = []
    for _ in range(400):
        for _ in range(rng.randint(0, 3)):
            live.append(
                driver.submit(
                    [rng.randint(3, 20) for _ in range(rng.randint(1, 20))],
                    rng.randint(1, 8),
                    client=rng.choice(("", "a", "b", "c", "d")),
                    priority=rng.choice((0, 0, 0, 1)),
                )
            )
        if rng.random() < 0.2:
            driver.abort(rng.choice(live), report=rng.random() < 0.9)
        driver.turn()
    driver.run()
    ended = Counter(len(outcome.ended) for outcome in driver.outcomes.values())
    assert ended[1] + ended[0] == len(driver.outcomes)
    assert ended[0] <= 40


def test_a_request_that_cannot_begin_within_its_deadline_is_refused_at_once() -> None:
    driver = one_at_a_time()
    uids = [driver.submit([1], 4) for _ in range(100)]
    # Four tokens, so four or five turns of a second, for each.
    driver.turns(80)
    with pytest.raises(QueueFullError, match="(79|80) requests are ahead") as refusal:
        driver.submit([2], 4, deadline=driver.now + 60)
    assert refusal.value.retry_after_ms == 60_000
    assert driver.submit([2], 4, deadline=driver.now + 400)
    assert driver.submit([2], 4)
    driver.abort(*uids)
    driver.run()


def test_another_clients_request_may_begin_in_time_where_the_greedy_ones_may_not() -> None:
    driver = one_at_a_time()
    uids = [driver.submit([1], 4, client="greedy") for _ in range(100)]
    driver.turns(80)
    with pytest.raises(QueueFullError):
        driver.submit([2], 4, client="greedy", deadline=driver.now + 60)
    modest = driver.submit([2], 4, client="modest", deadline=driver.now + 60)
    driver.turns(60)
    assert driver.outcomes[modest].finished
    driver.abort(*uids)


def test_without_a_history_no_deadline_is_called_too_short() -> None:
    driver = one_at_a_time()
    uids = [driver.submit([1], 4) for _ in range(50)]
    driver.turns(20)
    assert driver.submit([2], 4, deadline=driver.now + 1)
    driver.abort(*uids)
    driver.run()
