"""The echo engine: right text through right pages, and wrong text through wrong ones."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from shared.errors import EngineError
from shared.types import SamplingParams
from worker.engine.echo import UNWRITTEN, EchoEngine
from worker.engine.null import NullEngine
from worker.messages import NewRequest, StepOutput
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine, EngineInfo, StepHandle, StepPlan

EOS = 2
INFO = EngineInfo(num_pages=64, page_size=4, max_rows=4, max_context=64, vocab_size=100)


@pytest.fixture
def engine() -> Iterator[EchoEngine]:
    engine = EchoEngine(INFO, eos_token_id=EOS)
    yield engine
    engine.close()


def scheduler_with(*requests: NewRequest) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(token_budget=8), INFO, (EOS,))
    for request in requests:
        scheduler.add(request, 0.0)
    return scheduler


def request(uid: int, prompt: list[int], max_tokens: int = 20) -> NewRequest:
    return NewRequest(uid, np.array(prompt, np.int32), max_tokens)


def run(scheduler: Scheduler, engine: Engine) -> list[StepOutput]:
    """The overlap loop's order, to the end."""
    outputs = []
    in_flight: tuple[StepPlan, StepHandle] | None = None
    while not scheduler.is_idle:
        plan = scheduler.plan(0.0)
        launched = None if plan is None else (plan, engine.launch(plan))
        in_flight, previous = launched, in_flight
        if previous is not None:
            scheduler.commit(previous[0], previous[1].result(), 0.0)
        output = scheduler.drain_output(0.0)
        if output is not None:
            outputs.append(output)
    return outputs


def tokens_of(outputs: list[StepOutput], uid: int) -> list[int]:
    return [int(token) for output in outputs for token in output.token_ids[output.uids == uid]]


def test_each_request_gets_its_own_prompt_back(engine: EchoEngine) -> None:
    prompts = {uid: [10 * uid + i for i in range(9)] for uid in (1, 2, 3)}
    scheduler = scheduler_with(*(request(uid, prompt) for uid, prompt in prompts.items()))
    outputs = run(scheduler, engine)
    for uid, prompt in prompts.items():
        assert tokens_of(outputs, uid) == prompt
    ends = [end for output in outputs for end in output.finished]
    assert [end.matched_token_id for end in ends] == [EOS, EOS, EOS]


def test_until_min_tokens_it_goes_round_its_prompt(engine: EchoEngine) -> None:
    asking = replace(request(1, [11, 12, 13]), min_tokens=8)
    outputs = run(scheduler_with(asking, request(2, [21, 22])), engine)
    assert tokens_of(outputs, 1) == [11, 12, 13, 11, 12, 13, 11, 12]
    assert tokens_of(outputs, 2) == [21, 22]
    ends = {end.uid: end for output in outputs for end in output.finished}
    # The eos counts.
    assert (ends[1].matched_token_id, ends[1].completion_tokens) == (EOS, 9)


def test_until_min_tokens_it_passes_over_stop_ids_in_its_prompt(engine: EchoEngine) -> None:
    asking = replace(request(1, [11, 12, EOS, 13]), stop_token_ids=(12,), min_tokens=5)
    outputs = run(scheduler_with(asking), engine)
    # After the fifth token, the prompt is over.
    assert tokens_of(outputs, 1) == [11, 13, 13, 13, 11]
    (end,) = (end for output in outputs for end in output.finished)
    assert end.matched_token_id == EOS


def test_what_is_adjusted_for_good_is_banned_only_until_min_tokens(engine: EchoEngine) -> None:
    penalised = SamplingParams(repetition_penalty=2.0)
    asking = replace(request(1, [11, 12]), sampling=penalised, min_tokens=3)
    assert tokens_of(run(scheduler_with(asking), engine), 1) == [11, 12, 11]


def test_a_prompt_of_banned_ids_alone_is_not_echoed_until_min_tokens(engine: EchoEngine) -> None:
    asking = replace(request(1, [0, EOS]), stop_token_ids=(0,), min_tokens=3)
    outputs = run(scheduler_with(asking), engine)
    assert tokens_of(outputs, 1) == [1, 1, 1]


def test_the_next_request_in_a_row_is_free_of_the_bans_of_the_last(engine: EchoEngine) -> None:
    scheduler = scheduler_with(replace(request(1, [11]), min_tokens=4))
    run(scheduler, engine)
    scheduler.add(request(2, [21]), 0.0)
    assert tokens_of(run(scheduler, engine), 2) == [21]


def test_a_wrong_page_shows_as_wrong_text(engine: EchoEngine) -> None:
    scheduler = scheduler_with(request(1, [11, 12, 13, 14, 15, 16]))
    first = scheduler.plan(0.0)
    assert first is not None
    engine.launch(first).result()
    second = scheduler.plan(0.0)
    assert second is not None
    wrong = replace(
        second,
        page_rows=first.rows,
        page_columns=np.zeros(1, np.int32),
        page_ids=np.array([60], np.int32),
    )
    assert engine.launch(wrong).result().token_ids.tolist() == [UNWRITTEN]
    right = replace(wrong, page_ids=first.page_ids[:1])
    assert engine.launch(right).result().token_ids.tolist() == [12]


def test_a_told_failure_is_raised_by_its_step_alone() -> None:
    engine = EchoEngine(INFO, eos_token_id=EOS, failing_steps=(1,))
    plan = scheduler_with(request(1, [11, 12, 13])).plan(0.0)
    assert plan is not None
    handles = [engine.launch(plan) for _ in range(3)]
    assert handles[0].result().token_ids.tolist() == [11]
    with pytest.raises(EngineError, match="step 1"):
        handles[1].result()
    assert handles[2].result().token_ids.tolist() == [11]
    engine.close()


def test_a_told_row_is_flagged_as_not_finite() -> None:
    engine = EchoEngine(INFO, eos_token_id=EOS, faulty_rows=((1, 0),))
    plan = scheduler_with(request(1, [11, 12, 13])).plan(0.0)
    assert plan is not None
    handles = [engine.launch(plan) for _ in range(2)]
    assert [handle.result().faulty.tolist() for handle in handles] == [[False], [True]]
    engine.close()


def test_a_step_runs_while_the_caller_goes_on_and_takes_its_time() -> None:
    engine = EchoEngine(INFO, eos_token_id=EOS, step_s=0.02)
    plan = scheduler_with(request(1, [11, 12, 13])).plan(0.0)
    assert plan is not None
    first, second = engine.launch(plan), engine.launch(plan)
    assert not second.done()
    one, two = first.result(), second.result()
    assert one.finished_at - one.started_at >= 0.019
    assert two.started_at >= one.finished_at
    engine.close()


def test_closing_waits_for_steps_but_not_for_their_time() -> None:
    engine = EchoEngine(INFO, eos_token_id=EOS, step_s=600)
    plan = scheduler_with(request(1, [11, 12, 13])).plan(0.0)
    assert plan is not None
    step = engine.launch(plan)
    engine.close()
    engine.close()
    assert step.result().token_ids.tolist() == [11]
    assert not [t for t in threading.enumerate() if t.name.startswith("echo-engine")]


def test_the_null_engine_answers_at_once_with_its_token() -> None:
    engine = NullEngine(INFO, token_id=7)
    outputs = run(scheduler_with(request(1, [1], max_tokens=3)), engine)
    assert tokens_of(outputs, 1) == [7, 7, 7]


def test_an_echo_has_no_logits_and_was_certain_of_every_token() -> None:
    engine = EchoEngine(INFO, eos_token_id=EOS)
    assert not engine.info.has_logits
    asking = replace(request(1, [11, 12, 13]), logprobs=4, prompt_logprobs=4)
    plan = scheduler_with(asking).plan(0.0)
    assert plan is not None
    logprobs = engine.launch(plan).result().logprobs
    engine.close()
    assert logprobs is not None and logprobs.sampled is not None and logprobs.prompt is not None
    for entries, count in ((logprobs.sampled, 1), (logprobs.prompt, 2)):
        assert entries.logprobs.tolist() == [0.0] * count
        assert entries.ranks.tolist() == [1] * count
        assert entries.top_ids.shape == entries.top_logprobs.shape == (count, 0)
