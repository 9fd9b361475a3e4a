"""How prompts are cut by the token budget, and what decodes beside them."""

import numpy as np
import pytest

from tests.worker.scheduler.driver import Driver, engine_info
from worker.scheduler.config import Policy, SchedulerConfig

LONG = [7 + i % 80 for i in range(50)]
SHORT = [3, 4, 5]


def driver_with(budget: int, policy: Policy = Policy.MIXED, *, overlap: bool = True) -> Driver:
    config = SchedulerConfig(token_budget=budget, policy=policy)
    return Driver(info=engine_info(num_pages=128), config=config, eos=(), overlap=overlap)


def test_a_long_prompt_is_cut_by_the_budget() -> None:
    driver = driver_with(16)
    driver.submit(LONG, max_tokens=2)
    driver.run()
    extends = [plan.extend_lens.tolist() for plan in driver.engine.plans]
    assert extends == [[16], [16], [16], [2], [1]]
    assert [plan.cached_lens.tolist() for plan in driver.engine.plans[:4]] == [
        [0],
        [16],
        [32],
        [48],
    ]


def test_an_unfinished_chunk_samples_nothing_and_writes_to_the_sentinel() -> None:
    driver = driver_with(16)
    driver.submit(LONG, max_tokens=3)
    driver.run()
    sentinel = driver.info.max_rows
    row = driver.engine.plans[0].rows[0]
    assert [plan.samples.tolist() for plan in driver.engine.plans] == [
        [False],
        [False],
        [False],
        [True],
        [True],
        [True],
    ]
    # The last one ends the request, so that nobody will read its token either.
    written = [plan.write_rows.tolist() for plan in driver.engine.plans]
    assert written == [[sentinel]] * 3 + [[row], [row], [sentinel]]


def test_running_requests_decode_in_every_step_of_a_long_prefill() -> None:
    driver = driver_with(16)
    running = driver.submit(SHORT, max_tokens=30)
    driver.turns(3)
    driver.submit(LONG, max_tokens=2)
    row = driver.engine.plans[0].rows[0]
    seen = len(driver.engine.plans)
    driver.turns(4)
    for plan in driver.engine.plans[seen:]:
        assert plan.num_decode >= 1
        assert plan.rows[0] == row
        assert plan.num_tokens <= 16
    driver.run()
    assert len(driver.tokens(running)) == 30


def test_a_chunk_in_progress_goes_on_before_new_admissions() -> None:
    driver = driver_with(20)
    first = driver.submit(LONG, max_tokens=2)
    driver.turn()
    # Of higher priority, but the first has its row and pages already.
    driver.submit(LONG[::-1], max_tokens=2, priority=5)
    driver.turns(2)
    plan = driver.engine.plans[2]
    assert plan.extend_lens.tolist() == [10, 10]
    assert plan.cached_lens.tolist() == [40, 0]
    driver.run()
    assert len(driver.tokens(first)) == 2


def test_prefill_first_lets_no_one_decode_while_there_is_prefill() -> None:
    driver = driver_with(16, Policy.PREFILL_FIRST)
    driver.submit(SHORT, max_tokens=10)
    driver.turns(3)
    driver.submit(LONG, max_tokens=2)
    seen = len(driver.engine.plans)
    driver.turns(5)
    kinds = [plan.num_decode for plan in driver.engine.plans[seen:]]
    assert kinds == [0, 0, 0, 0, 2]
    driver.run()


def test_with_less_budget_than_requests_the_oldest_decode_first() -> None:
    driver = driver_with(2, overlap=False)
    uids = [driver.submit([i + 1], max_tokens=4) for i in range(4)]
    driver.run()
    ends = [driver.outcomes[uid].finished for uid in uids]
    assert [end.completion_tokens for end in ends] == [4, 4, 4, 4]
    assert all(plan.num_tokens <= 2 for plan in driver.engine.plans)
    assert ends[0].decode_s + ends[0].prefill_s < ends[3].decode_s + ends[3].queue_s


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("overlap", [True, False])
def test_the_chunk_size_does_not_change_what_is_sampled(policy: Policy, overlap: bool) -> None:
    outputs = []
    for budget in (1, 16, 10_000):
        driver = driver_with(budget, policy, overlap=overlap)
        rng = np.random.default_rng(3)
        prompts = [rng.integers(1, 90, length).tolist() for length in (1, 4, 16, 17, 40, 49)]
        uids = [driver.submit(prompt, max_tokens=10) for prompt in prompts]
        driver.run()
        outputs.append([driver.tokens(uid) for uid in uids])
    assert outputs[0] == outputs[1] == outputs[2]
