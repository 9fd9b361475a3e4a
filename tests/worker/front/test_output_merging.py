"""Events that wait become fewer, and say the same."""

import numpy as np

from shared.types import FinishReason
from worker.messages import CacheFlushed, Event, Finished, Heartbeat, Load, Started, StepOutput
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
