"""What a plan says of requests that ask for more than an ordinary draw, and what they get."""

from dataclasses import replace

import numpy as np
import pytest

from shared.errors import InvalidArgumentError, UnimplementedError
from shared.types import SamplingParams, StructuredOutput, StructureKind
from tests.fakes import scripted_model
from tests.worker.scheduler.driver import EOS, GREEDY, Driver, engine_info
from worker.scheduler.config import SchedulerConfig
from worker.step import StepPlan

_PENALISED = replace(GREEDY, repetition_penalty=1.5)
_RULE = StructuredOutput(StructureKind.JSON_OBJECT)


def plans_of(driver: Driver) -> list[StepPlan]:
    driver.run()
    return driver.engine.plans


def test_an_ordinary_step_says_nothing_of_features() -> None:
    driver = Driver(eos=())
    driver.submit([1, 2, 3], 3, sampling=SamplingParams(temperature=0.7, top_k=3, min_p=0.1))
    for plan in plans_of(driver):
        assert not plan.openings and not len(plan.adjusted) and not len(plan.masked)
        assert plan.logprobs is None


def test_an_opening_says_all_that_is_fixed_and_comes_once_with_the_first_chunk() -> None:
    driver = Driver(config=SchedulerConfig(token_budget=4), eos=(EOS, 7))
    params = SamplingParams(
        temperature=0.5,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        logit_bias=((3, 2.5), (4, -1.0)),
        allowed_token_ids=(3, 4, 9),
    )
    prompt = list(range(1, 11))
    driver.submit(prompt, 6, sampling=params, min_tokens=2, stop_token_ids=(12, 7))
    plans = plans_of(driver)
    assert [len(plan.openings) for plan in plans] == [1] + [0] * (len(plans) - 1)
    (opening,) = plans[0].openings
    assert (opening.row, opening.prompt_len, opening.min_len) == (plans[0].rows[0], 10, 12)
    assert opening.token_ids.tolist() == prompt
    penalties = (
        opening.repetition_penalty,
        opening.frequency_penalty,
        opening.presence_penalty,
    )
    assert penalties == (1.5, 0.5, -1.0)
    assert opening.bias_ids.tolist() == [3, 4]
    assert opening.bias_values.tolist() == [2.5, -1.0]
    assert opening.allowed_ids is not None and opening.allowed_ids.tolist() == [3, 4, 9]
    assert opening.banned_ids.tolist() == [EOS, 7, 12]
    # Chunks that do not sample are not adjusted; every sampling step is.
    assert [plan.adjusted.tolist() for plan in plans[:4]] == [[], [], [0], [0]]


def test_eos_is_not_banned_where_it_is_an_ordinary_token() -> None:
    driver = Driver()
    driver.submit([1], 3, min_tokens=3, ignore_eos=True, stop_token_ids=(12,))
    assert plans_of(driver)[0].openings[0].banned_ids.tolist() == [12]


def test_with_nothing_but_min_tokens_a_row_is_adjusted_until_they_are_sampled() -> None:
    driver = Driver(eos=())
    driver.submit([1, 2], 5, min_tokens=3)
    assert [len(plan.adjusted) for plan in plans_of(driver)] == [1, 1, 1, 0, 0]


def test_indices_are_of_the_plan_s_rows_among_others() -> None:
    driver = Driver(eos=())
    driver.submit([1, 2], 8)
    driver.submit([3, 4], 8, sampling=_PENALISED)
    driver.turn()
    driver.submit([5, 6], 8, structured_output=_RULE)
    driver.submit([7, 8, 9], 8, logprobs=4)
    driver.submit([7, 9, 9], 8, logprobs=2)
    plan = driver.turn()
    assert plan is not None and plan.logprobs is not None
    assert plan.prompt_lens.tolist() == [2, 2, 2, 3, 3]
    assert plan.adjusted.tolist() == [1]
    assert plan.masked.tolist() == [2]
    assert plan.logprobs.rows.tolist() == [3, 4]
    assert plan.logprobs.num_top == 4
    driver.run()


def test_a_resumed_request_is_opened_anew_with_what_it_sampled() -> None:
    info = engine_info(num_pages=16, page_size=4)
    driver = Driver(info=info, config=SchedulerConfig(headroom_tokens=0), eos=())
    driver.submit([1] * 20, 30, sampling=_PENALISED)
    newest = driver.submit([2] * 20, 30, sampling=_PENALISED)
    openings = [opening for plan in plans_of(driver) for opening in plan.openings]
    assert driver.scheduler.load().preemptions > 0
    assert [len(opening.token_ids) for opening in openings[:2]] == [20, 20]
    for opening in openings[2:]:
        sampled = opening.token_ids[20:].tolist()
        assert 0 < len(sampled) < 30
        assert sampled == driver.tokens(newest)[: len(sampled)]
        assert opening.prompt_len == 20


def test_a_row_s_next_owner_inherits_nothing() -> None:
    driver = Driver(info=engine_info(max_rows=1), eos=())
    driver.submit([1, 2], 2, sampling=_PENALISED, min_tokens=2, logprobs=1, structured_output=_RULE)
    driver.submit([3, 4], 2)
    plans = plans_of(driver)
    for plan in plans:
        is_first = plan.rows[0] == 0 and plan.step_id < 2
        assert (len(plan.adjusted) > 0) == (len(plan.masked) > 0) == is_first
        assert (plan.logprobs is not None) == is_first


@pytest.mark.parametrize("token_budget", [3, 64])
def test_prompt_logprobs_bypass_the_cache_and_are_each_token_s_but_the_first(
    token_budget: int,
) -> None:
    driver = Driver(config=SchedulerConfig(token_budget=token_budget), eos=())
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    driver.complete(prompt)
    asking = driver.submit(prompt, 2, prompt_logprobs=2)
    plain = driver.submit(prompt, 2)
    driver.run()
    outcome = driver.outcomes[asking]
    assert outcome.prompt_logprobs == [(t, [t, t + 1]) for t in prompt[1:]]
    assert outcome.finished.cached_tokens == 0
    assert driver.outcomes[plain].finished.cached_tokens > 0
    assert outcome.token_ids == driver.tokens(plain)


def test_a_prompt_of_one_token_owes_none_and_uses_the_step_as_any_other() -> None:
    driver = Driver(eos=())
    uid = driver.submit([5], 2, prompt_logprobs=3)
    plans = plans_of(driver)
    assert all(plan.logprobs is None for plan in plans)
    assert driver.outcomes[uid].prompt_logprobs == []


def test_prompt_entries_name_their_inputs_behind_the_decode_rows() -> None:
    driver = Driver(eos=())
    driver.submit([1, 2, 3], 9)
    driver.turn()
    driver.submit([20, 21, 22], 2)
    driver.submit([30, 31, 32, 33], 2, prompt_logprobs=1)
    plan = driver.turn()
    assert plan is not None and plan.logprobs is not None
    # One decode row, three inputs of the first chunk, then those of the second.
    assert plan.logprobs.prompt_inputs.tolist() == [4, 5, 6]
    assert plan.logprobs.prompt_targets.tolist() == [31, 32, 33]
    assert plan.logprobs.prompt_rows.tolist() == [2]
    assert plan.logprobs.prompt_counts.tolist() == [3]
    driver.run()


def test_the_token_that_matched_has_no_entry() -> None:
    driver = Driver(model=scripted_model({1: [5, 6, EOS]}))
    uid = driver.submit([1, 2], 9, logprobs=1)
    driver.run()
    assert driver.outcomes[uid].logprobs == [(5, [5]), (6, [6])]


def test_a_prompt_whose_logprobs_are_no_numbers_fails_its_own_request() -> None:
    driver = Driver(eos=())
    asking = driver.submit([1, 2, 3], 4, prompt_logprobs=0)
    other = driver.submit([1, 2, 4], 4, prompt_logprobs=0)
    plan = driver.scheduler.plan(1.0)
    assert plan is not None
    result = driver.engine.launch(plan).result()
    assert result.logprobs is not None and result.logprobs.prompt is not None
    result.logprobs.prompt.logprobs[1] = np.nan
    driver.scheduler.commit(plan, result, 1.0)
    output = driver.scheduler.drain_output(1.0)
    assert output is not None
    assert [failed.uid for failed in output.failed] == [asking]
    assert output.uids.tolist() == [other]
    assert [set(logprobs.uids.tolist()) for logprobs in output.logprobs] == [{other}]


def test_allowed_ids_that_could_only_end_the_completion_are_refused() -> None:
    driver = Driver(eos=(EOS,))
    params = SamplingParams(allowed_token_ids=(EOS, 5))
    with pytest.raises(InvalidArgumentError) as refusal:
        driver.submit([1], 4, sampling=params, min_tokens=1, stop_token_ids=(5,))
    assert refusal.value.field == "sampling.allowed_token_ids"
    driver.submit([1], 4, sampling=params, min_tokens=1, stop_token_ids=(5,), ignore_eos=True)
    driver.submit([1], 4, sampling=params, min_tokens=1)
    driver.run()


def test_a_rule_for_an_engine_without_logits_is_unimplemented() -> None:
    driver = Driver(info=replace(engine_info(), has_logits=False))
    with pytest.raises(UnimplementedError) as refusal:
        driver.submit([1], 4, structured_output=_RULE)
    assert refusal.value.field == "structured_output"


@pytest.mark.parametrize("overlap", [True, False])
def test_of_several_priorities_the_lowest_gives_way_and_within_it_the_newest(
    overlap: bool,
) -> None:
    info = engine_info(num_pages=16, page_size=4)
    driver = Driver(info=info, config=SchedulerConfig(headroom_tokens=0), eos=(), overlap=overlap)
    for i, priority in enumerate([0, -1, -1, 0], 1):
        driver.submit([i] * 9, 20, priority=priority, sampling=_PENALISED)
    opened = [int(o.token_ids[0]) for plan in plans_of(driver) for o in plan.openings]
    assert driver.scheduler.load().preemptions > 0
    resumed = opened[4:]
    assert set(resumed) <= {2, 3}
    assert 3 in resumed
