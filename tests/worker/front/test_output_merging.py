"""Events that wait become fewer, and say the same."""

import numpy as np

from shared.types import FinishReason
from worker.messages import (
    CacheFlushed,
    Event,
    Finished,
    Heartbeat,
    Load,
    Started,
    StepOutput,
    TokenLogprobs,
)
from worker.output_merging import merged


def step(uid: int, token_id: int, *, steps: int, committed_at: float = 1.0) -> StepOutput:
    return StepOutput(
        uids=np.array([uid]),
        token_ids=np.array([token_id], np.int32),
        load=Load(steps=steps),
        committed_at=committed_at,
    )


def finished(uid: int) -> Finished:
    return Finished(uid, FinishReason.LENGTH, -1, 0, 2, 0.0, 0.0, 0.0)


def test_steps_in_a_row_become_one_in_their_order() -> None:
    events: list[Event] = [
        StepOutput(started=(Started(7, 0, 0, 0.0),)),
        step(7, 1, steps=1, committed_at=5.0),
        step(7, 2, steps=2, committed_at=6.0),
        StepOutput(finished=(finished(7),), load=Load(steps=3)),
    ]
    (output,) = merged(events)
    assert isinstance(output, StepOutput)
    assert output.uids.tolist() == [7, 7]
    assert output.token_ids.tolist() == [1, 2]
    assert output.token_ids.dtype == np.int32
    assert (output.started[0].uid, output.finished[0].uid) == (7, 7)
    assert output.committed_at == 5.0
    assert output.load.steps == 3


def test_other_events_keep_their_places() -> None:
    events: list[Event] = [
        *(step(1, 1, steps=1), CacheFlushed(1, 5)),
        *(step(1, 2, steps=2), step(1, 3, steps=3)),
    ]
    first, flushed, second = merged(events)
    assert isinstance(first, StepOutput) and isinstance(second, StepOutput)
    assert flushed == CacheFlushed(1, 5)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1], [2, 3])


def test_of_signs_of_life_the_last_is_left() -> None:
    beats = [Heartbeat(Load(steps=steps)) for steps in range(3)]
    assert merged(beats) == [Heartbeat(Load(steps=2))]


def test_what_waited_for_long_goes_in_several_messages() -> None:
    outputs = merged([step(1, number, steps=number) for number in range(1000)])
    assert 1 < len(outputs) < 10
    token_ids = [
        i for output in outputs if isinstance(output, StepOutput) for i in output.token_ids
    ]
    assert token_ids == list(range(1000))


def step_with_logprobs(token_id: int, num_entries: int) -> StepOutput:
    ids = np.full(num_entries, token_id, np.int32)
    likeliest = np.zeros((num_entries, 20), np.int32)
    entries = TokenLogprobs(
        is_prompt=False,
        uids=np.arange(num_entries),
        token_ids=ids,
        logprobs=np.zeros(num_entries, np.float32),
        ranks=ids,
        num_top=np.full(num_entries, 20, np.int32),
        top_ids=likeliest,
        top_logprobs=likeliest.astype(np.float32),
    )
    return StepOutput(np.arange(num_entries), ids, logprobs=(entries,))


def test_many_logprobs_go_in_more_messages_none_of_which_is_too_large_for_a_gateway() -> None:
    outputs = [step_with_logprobs(number, 1024) for number in range(100)]
    # More than a message should have, but not to be divided.
    outputs.append(step_with_logprobs(100, 20_000))
    joined = [output for output in merged(outputs) if isinstance(output, StepOutput)]
    assert 1 < len(joined) < 50
    assert all(len(output.uids) <= 8192 for output in joined[:-1])
    parts = [part for output in joined for part in output.logprobs]
    assert [int(part.token_ids[0]) for part in parts] == list(range(101))
    for output in joined:
        told = np.concatenate([part.token_ids for part in output.logprobs])
        assert np.array_equal(told, output.token_ids)
