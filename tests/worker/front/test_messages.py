"""What crosses the pipe arrives as it was sent."""

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from shared.errors import Code
from shared.types import FinishReason
from worker.messages import Failed, Finished, Heartbeat, Load, Started, StepOutput, TokenLogprobs

LARGE = 200_000
# Each number another: one that is put in the place of another is seen.
LOAD = Load(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0.125)
STARTED = (Started(1 << 40, 2, 3, 0.5), Started(4, 5, 6, 0.25))
FINISHED = (
    Finished(1 << 40, FinishReason.EOS, 2, 3, 4, 0.5, 0.25, 0.125),
    Finished(5, FinishReason.TIME_LIMIT, -1, 6, 7, 8.5, 9.5, 10.5),
)
FAILED = (Failed(1 << 40, Code.INTERNAL, "a", "b", 5), Failed(6, Code.CANCELLED, "c"))


def logprobs(*, is_prompt: bool, count: int, num_top: int) -> TokenLogprobs:
    rng = np.random.default_rng(count)
    return TokenLogprobs(
        is_prompt=is_prompt,
        uids=np.arange(count) + (1 << 40),
        token_ids=rng.integers(0, 1 << 31, count, np.int32),
        logprobs=-rng.random(count, np.float32),
        ranks=rng.integers(1, 1 << 31, count, np.int32),
        num_top=rng.integers(0, num_top + 1, count, np.int32),
        top_ids=rng.integers(0, 1 << 31, (count, num_top), np.int32),
        top_logprobs=np.full((count, num_top), -np.inf, np.float32),
    )


def assert_same(one: object, other: object) -> None:
    """Every field of both, whatever it holds, to the types of its numbers."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
    elif isinstance(one, tuple):
        assert isinstance(other, tuple)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, StepOutput | TokenLogprobs):
        for each in fields(one):
            assert_same(getattr(one, each.name), getattr(other, each.name))
    else:
        assert one == other


def sent(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


@pytest.mark.parametrize("count", [1, 256, LARGE])
def test_tokens_arrive_as_they_were_sent(count: int) -> None:
    uids = np.arange(count) + (1 << 40)
    output = StepOutput(uids, np.arange(count, dtype=np.int32), load=LOAD, committed_at=1.5)
    assert_same(sent(output), output)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"started": STARTED},
        {"finished": FINISHED},
        {"failed": FAILED},
        {"load": LOAD, "committed_at": 2.5},
        {"logprobs": (logprobs(is_prompt=False, count=3, num_top=2),)},
        {"logprobs": (logprobs(is_prompt=True, count=LARGE, num_top=20),)},
        {
            "logprobs": (
                logprobs(is_prompt=True, count=2, num_top=0),
                logprobs(is_prompt=False, count=0, num_top=0),
                logprobs(is_prompt=False, count=0, num_top=5),
            )
        },
        {"started": STARTED, "finished": FINISHED, "failed": FAILED, "load": LOAD},
    ],
    ids=lambda told: "+".join(told) or "nothing",
)
def test_whatever_else_a_step_tells_arrives_as_it_was_sent(told: dict[str, Any]) -> None:
    output = StepOutput(**told)
    assert_same(sent(output), output)


def test_no_field_of_an_output_is_left_behind() -> None:
    # Those with a default would come with it, were they forgotten where an output is taken apart.
    _, parts = StepOutput().__reduce__()
    assert len(parts) == len(fields(StepOutput))


def test_numbers_of_another_type_arrive_as_those_they_were() -> None:
    output = StepOutput(np.array([3, 4], np.int32), np.array([5, 1 << 30], np.int64))
    there = sent(output)
    assert (there.uids.tolist(), there.token_ids.tolist()) == ([3, 4], [5, 1 << 30])
    assert (there.uids.dtype, there.token_ids.dtype) == (np.int64, np.int32)


def test_a_part_of_a_larger_array_arrives_alone() -> None:
    whole = logprobs(is_prompt=False, count=8, num_top=4)
    part = replace(whole, top_ids=whole.top_ids[:, 1:3], top_logprobs=whole.top_logprobs[:, 1:3])
    assert_same(sent(part), part)
    every_other = StepOutput(whole.uids[::2], whole.token_ids[::-2])
    assert_same(sent(every_other), every_other)


def test_a_load_arrives_by_itself_too() -> None:
    assert sent(Heartbeat(LOAD)) == Heartbeat(LOAD)
