"""The engine loop and requests for structured output: held until compiled, masked, followed."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from shared.errors import Code
from shared.types import FinishReason
from tests.worker.running_loop import EOS, INFO, Running, failed, finished
from tests.worker.structured.fake_library import NONSENSE, FakeLibrary, rule
from tests.worker.structured.vocabulary import ids_of
from worker.messages import Abort, Fatal, Heartbeat, Stop

# What must not wait for the half second until the next heartbeat.
AT_ONCE_S = 0.3


class Serving(Running):
    """A loop with a fake grammar library."""

    def __init__(
        self,
        *,
        overlap: bool = True,
        compiler_gated: bool = False,
        gated: bool = False,
        structure_timeout_s: float = 60.0,
        most_structures_waiting: int = 100,
    ) -> None:
        self.grammars = FakeLibrary(INFO.vocab_size, EOS, gated=compiler_gated)
        super().__init__(
            overlap=overlap,
            gated=gated,
            grammars=self.grammars,
            structure_timeout_s=structure_timeout_s,
            most_structures_waiting=most_structures_waiting,
        )

    def close(self) -> None:
        self.grammars.gate.set()
        super().close()


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    serving = Serving(overlap=request.param)
    yield serving
    serving.close()


@pytest.fixture
def waiting() -> Iterator[Serving]:
    """Its compiler is stopped by a gate."""
    serving = Serving(compiler_gated=True)
    yield serving
    serving.close()


def test_a_masked_request_runs_to_its_end_beside_a_free_one(serving: Serving) -> None:
    serving.submit(1, [5, 6, 7], structure=rule([5, 6, 7]))
    serving.submit(2, [8, 9])
    assert finished(serving.end_of(1)).reason is FinishReason.EOS
    assert finished(serving.end_of(2)).reason is FinishReason.EOS
    assert serving.tokens == {1: [5, 6, 7], 2: [8, 9]}


def test_each_mask_is_made_after_all_earlier_tokens(serving: Serving) -> None:
    serving.submit(1, [5, 6, 7], structure=rule([5, 6, 7]))
    serving.end_of(1)
    assert serving.grammars.log == [("fill", 0), ("fill", 1), ("fill", 2), ("fill", 3)]


def test_masks_are_written_where_the_step_wants_them(serving: Serving) -> None:
    buffer = np.zeros((4, serving.grammars.mask_words), np.int32)
    serving.engine.mask_buffer = buffer
    serving.submit(1, [5], max_tokens=1, structure=rule([5]))
    serving.end_of(1)
    assert ids_of(buffer[0]) == {5}


def test_under_overlap_a_mask_is_made_while_its_step_runs() -> None:
    serving = Serving(overlap=True)
    serving.grammars.log = serving.engine.log
    serving.submit(1, [5, 6], max_tokens=2, structure=rule([5, 6]))
    serving.end_of(1)
    serving.close()
    assert serving.engine.log == [
        ("launch", 0),
        ("fill", 0),
        ("launch", 1),
        ("result", 0),
        ("fill", 1),
        ("result", 1),
    ]


def test_other_requests_go_on_while_a_rule_is_compiled(waiting: Serving) -> None:
    waiting.submit(1, [5, 6], structure=rule([5, 6]))
    waiting.submit(2, [7, 8])
    assert finished(waiting.end_of(2)).reason is FinishReason.EOS
    assert 1 not in waiting.tokens
    waiting.grammars.gate.set()
    assert finished(waiting.end_of(1)).reason is FinishReason.EOS
    assert waiting.tokens[1] == [5, 6]


def test_a_compiled_rule_is_noticed_at_once_and_the_loop_sleeps_until_then(
    waiting: Serving,
) -> None:
    waiting.submit(1, [5], structure=rule([5]))
    waiting.next(lambda event: isinstance(event, Heartbeat))
    polls_before = waiting.channel.num_polls
    waiting.next(lambda event: isinstance(event, Heartbeat))
    assert waiting.channel.num_polls - polls_before <= 4
    released_at = time.monotonic()
    waiting.grammars.gate.set()
    waiting.end_of(1)
    assert time.monotonic() - released_at < AT_ONCE_S


def test_a_rule_is_compiled_once(serving: Serving) -> None:
    for uid in range(1, 5):
        serving.submit(uid, [5, 6], structure=rule([5, 6]))
    for uid in range(1, 5):
        serving.end_of(uid)
    serving.submit(5, [5, 6], structure=rule([5, 6]))
    assert finished(serving.end_of(5)).reason is FinishReason.EOS
    assert serving.grammars.compiled == ["5 6"]


def test_a_bad_rule_is_refused_each_time_with_its_field(serving: Serving) -> None:
    bad = rule([])
    bad = type(bad)(bad.kind, NONSENSE)
    for uid in (1, 2):
        serving.submit(uid, [5], structure=bad)
        end = failed(serving.end_of(uid))
        assert (end.code, end.field) == (Code.INVALID_ARGUMENT, "structured_output.grammar")
    assert serving.grammars.compiled == [NONSENSE]
    serving.submit(3, [5], structure=rule([5]))
    assert finished(serving.end_of(3))


def test_a_request_whose_matcher_cannot_be_made_ends_once_and_leaves_the_queue(
    serving: Serving,
) -> None:
    serving.grammars.matchers_left = 1
    serving.submit(1, [5], structure=rule([5]))
    assert finished(serving.end_of(1)).reason is FinishReason.EOS
    # The rule is known by now, so the matcher is asked for when the request comes.
    serving.submit(2, [5], structure=rule([5]))
    assert failed(serving.end_of(2)).code is Code.INTERNAL
    heartbeat = serving.next(lambda event: isinstance(event, Heartbeat))
    assert isinstance(heartbeat, Heartbeat)
    assert (heartbeat.load.running, heartbeat.load.waiting) == (0, 0)


def test_without_a_grammar_library_structured_output_is_unimplemented() -> None:
    running = Running()
    running.submit(1, [5], structure=rule([5]))
    end = failed(running.end_of(1))
    assert (end.code, end.field) == (Code.UNIMPLEMENTED, "structured_output")
    running.close()


@pytest.mark.parametrize("report", [True, False])
def test_a_request_that_waits_for_its_rule_can_be_aborted(waiting: Serving, report: bool) -> None:
    waiting.submit(1, [5, 6], structure=rule([5, 6]))
    waiting.send(Abort((1,), report))
    if report:
        end = finished(waiting.end_of(1))
        assert (end.reason, end.completion_tokens) == (FinishReason.ABORTED, 0)
    waiting.grammars.gate.set()
    # The rule is the same, but it is another request that waits for it.
    waiting.submit(2, [5, 6], structure=rule([5, 6]))
    assert finished(waiting.end_of(2)).reason is FinishReason.EOS
    assert 1 not in waiting.tokens


def test_a_deadline_ends_a_request_that_waits_for_its_rule_in_time(waiting: Serving) -> None:
    due = time.monotonic() + 0.05
    waiting.submit(1, [5], structure=rule([5]), deadline=due)
    assert failed(waiting.end_of(1)).code is Code.DEADLINE_EXCEEDED
    assert due <= time.monotonic() < due + AT_ONCE_S


def test_a_time_limit_ends_a_request_that_waits_for_its_rule_in_time(waiting: Serving) -> None:
    due = time.monotonic() + 0.05
    waiting.submit(1, [5], structure=rule([5]), time_limit=due)
    assert finished(waiting.end_of(1)).reason is FinishReason.TIME_LIMIT
    assert due <= time.monotonic() < due + AT_ONCE_S


def test_a_rule_that_takes_too_long_to_compile_is_refused_in_time() -> None:
    serving = Serving(compiler_gated=True, structure_timeout_s=0.05)
    asked_at = time.monotonic()
    serving.submit(1, [5], structure=rule([5]))
    end = failed(serving.end_of(1))
    assert (end.code, end.field) == (Code.INVALID_ARGUMENT, "structured_output")
    assert time.monotonic() - asked_at < 0.05 + AT_ONCE_S
    serving.close()


def test_those_behind_rules_that_take_too_long_are_told_to_come_again() -> None:
    serving = Serving(compiler_gated=True, structure_timeout_s=0.05)
    # One more than there are compilers.
    for uid in (1, 2, 3):
        serving.submit(uid, [uid], structure=rule([uid]))
    codes = [failed(serving.end_of(uid)).code for uid in (1, 2, 3)]
    assert codes == [Code.INVALID_ARGUMENT, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED]
    serving.close()


def test_requests_that_wait_for_their_rules_count_against_the_queue(waiting: Serving) -> None:
    for uid in range(1, 8):
        waiting.submit(uid, [uid], structure=rule([uid]))
    # Four would have a place and two may wait.
    assert failed(waiting.end_of(7)).code is Code.RESOURCE_EXHAUSTED
    waiting.grammars.gate.set()
    for uid in range(1, 7):
        assert finished(waiting.end_of(uid)).reason is FinishReason.EOS


def test_a_flood_of_new_rules_leaves_their_places_to_free_requests() -> None:
    serving = Serving(compiler_gated=True, gated=True, most_structures_waiting=1)
    # Four would have a place and two may wait.
    for uid in range(1, 8):
        serving.submit(uid, [uid], structure=rule([uid]))
    for uid in range(2, 8):
        end = failed(serving.end_of(uid))
        assert end.code is Code.RESOURCE_EXHAUSTED
        assert end.retry_after_ms > 0
        assert "structured outputs" in end.message
    for uid in range(11, 16):
        serving.submit(uid, [uid])
    serving.grammars.gate.set()
    serving.engine.allow(100)
    for uid in (1, *range(11, 16)):
        assert finished(serving.end_of(uid)).reason is FinishReason.EOS
    serving.close()


def test_whoever_waits_no_more_leaves_its_place_before_the_compiler() -> None:
    serving = Serving(compiler_gated=True, most_structures_waiting=1)
    serving.submit(1, [1], structure=rule([1]))
    # Until a compiler takes it, it counts even when it has ended.
    assert serving.grammars.compiling.wait(AT_ONCE_S * 10)
    serving.submit(2, [2], structure=rule([2]))
    assert failed(serving.end_of(2)).code is Code.RESOURCE_EXHAUSTED
    serving.send(Abort((1,), report=True))
    assert finished(serving.end_of(1)).reason is FinishReason.ABORTED
    serving.submit(3, [3], structure=rule([3]))
    serving.grammars.gate.set()
    assert finished(serving.end_of(3)).reason is FinishReason.EOS
    serving.close()


def test_stop_leaves_the_loop_while_a_rule_is_compiled(waiting: Serving) -> None:
    waiting.submit(1, [5], structure=rule([5]))
    assert waiting.grammars.compiling.wait(AT_ONCE_S * 10)
    waiting.send(Stop())
    waiting.join()


def test_a_closed_pipe_leaves_the_loop_while_a_rule_is_compiled(waiting: Serving) -> None:
    waiting.submit(1, [5], structure=rule([5]))
    assert waiting.grammars.compiling.wait(AT_ONCE_S * 10)
    waiting.pipe.close()
    waiting.join()
    assert not [event for event in waiting.events.queue if isinstance(event, Fatal)]


def test_a_matcher_at_its_limit_ends_its_own_request_alone(serving: Serving) -> None:
    serving.grammars.limit = 2
    serving.submit(1, [5, 6, 7], structure=rule([5, 6, 7]))
    serving.submit(2, [8, 9, 10])
    end = failed(serving.end_of(1))
    assert (end.code, end.field) == (Code.INVALID_ARGUMENT, "structured_output")
    assert serving.tokens[1] == [5, 6]
    assert finished(serving.end_of(2)).reason is FinishReason.EOS


def test_a_token_against_the_rule_ends_its_own_request_as_a_fault_of_ours(
    serving: Serving,
) -> None:
    # The fake engine samples what it likes.
    serving.submit(1, [5, 6, 7], structure=rule([5, 9, 7]))
    serving.submit(2, [8, 9, 10])
    assert failed(serving.end_of(1)).code is Code.INTERNAL
    assert finished(serving.end_of(2)).reason is FinishReason.EOS


def test_a_failed_step_ends_its_requests_and_later_ones_are_masked(serving: Serving) -> None:
    serving.engine.failures[1] = "lost"
    serving.submit(1, [5, 6, 7], structure=rule([5, 6, 7]))
    assert failed(serving.end_of(1)).code is Code.INTERNAL
    serving.submit(2, [5, 6], structure=rule([5, 6]))
    assert finished(serving.end_of(2)).reason is FinishReason.EOS


def test_an_abort_amid_its_steps_leaves_the_others_masked() -> None:
    serving = Serving(gated=True)
    serving.submit(1, [5] * 30, max_tokens=30, structure=rule([5] * 30))
    serving.submit(2, [6] * 10, structure=rule([6] * 10))
    serving.engine.allow(4)
    serving.engine.wait_launched(5)
    serving.send(Abort((1,), report=True))
    serving.engine.allow(100)
    assert finished(serving.end_of(1)).reason is FinishReason.ABORTED
    assert finished(serving.end_of(2)).reason is FinishReason.EOS
    assert serving.tokens[2] == [6] * 10
    serving.close()
