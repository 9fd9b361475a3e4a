"""The engine loop on a thread, over a real pipe: its order, its commands, its ways to end."""

import gzip
import json
from collections.abc import Iterator

import numpy as np
import pytest

from shared.errors import Code, EngineError
from shared.types import FinishReason
from tests.fakes import FakeEngine, echo_model
from tests.worker.running_loop import WAIT_S, Running, failed, finished
from worker.engine_loop import EngineLoop
from worker.messages import (
    Abort,
    CacheFlushed,
    Command,
    Event,
    Fatal,
    FlushCache,
    Heartbeat,
    NewRequest,
    StepOutput,
    Stop,
    Submit,
    Trace,
    Traced,
)
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import EngineInfo


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    running = Running(overlap=request.param)
    yield running
    running.close()


@pytest.fixture
def gated() -> Iterator[Running]:
    running = Running(gated=True)
    yield running
    running.close()


def test_requests_stream_their_tokens_and_end(running: Running) -> None:
    running.submit(1, [5, 6, 7])
    running.submit(2, [8, 9], max_tokens=1)
    assert finished(running.end_of(2)).reason is FinishReason.LENGTH
    assert finished(running.end_of(1)).reason is FinishReason.EOS
    assert running.tokens == {1: [5, 6, 7], 2: [8]}


def test_overlap_launches_the_next_step_before_it_waits_for_the_last() -> None:
    running = Running(overlap=True)
    running.submit(1, [5, 6, 7], max_tokens=3)
    running.end_of(1)
    running.close()
    assert running.engine.log == [
        ("launch", 0),
        ("launch", 1),
        ("result", 0),
        ("launch", 2),
        ("result", 1),
        ("result", 2),
    ]


def test_the_serial_loop_waits_for_each_step() -> None:
    running = Running(overlap=False)
    running.submit(1, [5, 6], max_tokens=2)
    running.end_of(1)
    running.close()
    assert running.engine.log == [
        ("launch", 0),
        ("result", 0),
        ("launch", 1),
        ("result", 1),
    ]


def test_an_abort_takes_effect_within_two_steps(gated: Running) -> None:
    gated.submit(1, list(range(1, 30)), max_tokens=30)
    gated.engine.allow(3)
    gated.engine.wait_launched(5)
    gated.send(Abort((1,), report=True))
    gated.engine.allow(2)
    end = finished(gated.end_of(1))
    assert end.reason is FinishReason.ABORTED
    assert end.completion_tokens == len(gated.tokens[1]) <= 5
    gated.submit(2, [7], max_tokens=1)
    gated.engine.allow(10)
    gated.end_of(2)
    assert len(gated.engine.plans) <= 7


def test_a_rejected_request_fails_and_the_next_one_runs(running: Running) -> None:
    running.submit(1, [5, 6, 7], max_tokens=0)
    end = failed(running.end_of(1))
    assert (end.code, end.field) == (Code.INVALID_ARGUMENT, "max_tokens")
    running.submit(2, [5])
    assert finished(running.end_of(2))


def test_a_full_queue_answers_at_once_with_a_time_to_wait(gated: Running) -> None:
    gated.submit(1, [1])
    gated.engine.wait_launched(2)
    for uid in range(2, 8):
        gated.submit(uid, [uid])
    gated.engine.allow(1)
    # No further step may end, and yet it is told.
    end = failed(gated.end_of(7))
    assert end.code is Code.RESOURCE_EXHAUSTED
    assert end.retry_after_ms > 0
    gated.engine.allow(100)
    for uid in (1, 6):
        assert finished(gated.end_of(uid)).reason is FinishReason.EOS


def test_a_uid_submitted_twice_leaves_the_first_unaffected(gated: Running) -> None:
    gated.submit(1, [5, 6])
    gated.engine.wait_launched(1)
    gated.submit(1, [9])
    gated.engine.allow(100)
    assert finished(gated.end_of(1)).reason is FinishReason.EOS
    assert gated.tokens[1] == [5, 6]


def test_bad_commands_do_not_end_the_loop(running: Running) -> None:
    running.send("nonsense", None, Abort((99,), report=True))
    running.pipe.send_bytes(b"not a pickle")
    running.send(Submit(NewRequest(1, None, 5)))  # type: ignore[arg-type]
    end = failed(running.end_of(1))
    assert end.code is Code.INTERNAL
    # What Python said of it is for the log.
    assert "None" not in end.message
    running.submit(2, [5])
    assert finished(running.end_of(2))


def test_an_engine_error_fails_its_step_and_the_loop_goes_on(running: Running) -> None:
    running.engine.failures.update({1: "garbage", 5: "refused"})
    running.submit(1, [5, 6, 7])
    assert failed(running.end_of(1)).code is Code.INTERNAL
    running.submit(2, [5, 6, 7, 8, 9, 10])
    assert failed(running.end_of(2)).code is Code.INTERNAL
    running.submit(3, [5, 6])
    assert finished(running.end_of(3))
    assert running.tokens[3] == [5, 6]


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), KeyError("x")])
def test_any_other_exception_is_told_as_fatal_and_ends_the_loop(
    running: Running, error: Exception
) -> None:
    running.engine.crashes[1] = error
    running.submit(1, [5, 6, 7])
    event = running.next(lambda event: isinstance(event, Fatal))
    assert isinstance(event, Fatal)
    assert type(error).__name__ in event.message
    running.join()


def test_flush_answers_with_what_it_freed(running: Running) -> None:
    running.submit(1, [5] * 17, max_tokens=1)
    running.end_of(1)
    running.send(FlushCache(call_id=7))
    assert running.next(lambda e: isinstance(e, CacheFlushed)) == CacheFlushed(7, 4)


def test_an_idle_loop_beats_and_sleeps(running: Running) -> None:
    for _ in range(2):
        event = running.next(lambda event: isinstance(event, Heartbeat))
        assert isinstance(event, Heartbeat)
        assert event.load.pages_free == 64
    assert running.engine.log == []


class _Script:
    """Commands one a turn, and Stop a few turns later, all long before a beat is due."""

    def __init__(self, *commands: Command) -> None:
        self._waiting: list[Command | None] = [*commands, *[None] * 5, Stop()]

    def poll(self, timeout: float) -> bool:
        if self._waiting[0] is None:
            self._waiting.pop(0)
            return False
        return True

    def recv(self) -> Command:
        command = self._waiting.pop(0)
        assert command is not None
        self._waiting.insert(0, None)
        return command


@pytest.mark.parametrize("overlap", [True, False])
def test_the_load_is_told_when_the_last_request_is_dropped(overlap: bool) -> None:
    info = EngineInfo(num_pages=64, page_size=4, max_rows=8, max_context=64, vocab_size=100)
    events: list[Event] = []
    loop = EngineLoop(
        Scheduler(SchedulerConfig(), info, (0,)),
        FakeEngine(info, echo_model(0)),
        _Script(Submit(NewRequest(1, np.array([5] * 30, np.int32), 30)), Abort((1,), report=False)),
        events.append,
        overlap=overlap,
    )
    loop.run()
    assert any(isinstance(event, StepOutput) and event.load.running for event in events)
    last = events[-1]
    assert isinstance(last, Heartbeat)
    assert last.load.running == last.load.pages_held == 0


def test_load_comes_with_each_output(running: Running) -> None:
    running.submit(1, [5, 6])
    running.end_of(1)
    running.submit(2, [5, 6])
    event = running.next(lambda e: isinstance(e, StepOutput) and bool(e.finished))
    assert isinstance(event, StepOutput)
    assert event.load.running == event.load.waiting == 0
    assert event.load.prompt_tokens == 4
    assert event.load.idle_s >= 0


def test_a_deadline_ends_a_running_request(running: Running) -> None:
    new = NewRequest(1, np.array([5] * 30, np.int32), 30, deadline=1e-9)
    running.send(Submit(new))
    assert failed(running.end_of(1)).code is Code.DEADLINE_EXCEEDED


def test_stop_leaves_the_loop(running: Running) -> None:
    running.submit(1, [5] * 30)
    running.send(Stop())
    running.join()
    assert not [event for event in running.events.queue if isinstance(event, Fatal)]
    # Nobody reads the other end any more.
    running.submit(2, [5])
    assert running.loops_end.poll(WAIT_S)


def test_a_closed_pipe_leaves_the_loop(running: Running) -> None:
    running.pipe.close()
    running.join()
    assert not [e for e in running.events.queue if isinstance(e, Fatal)]


def test_a_trace_shows_host_and_device_in_the_next_steps(gated: Running) -> None:
    gated.submit(1, [5] * 20)
    gated.engine.wait_launched(2)
    gated.send(Trace(call_id=3, num_steps=4))
    gated.engine.allow(100)
    event = gated.next(lambda event: isinstance(event, Traced))
    assert isinstance(event, Traced)
    assert event.call_id == 3
    spans = json.loads(gzip.decompress(event.trace_json_gz))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in spans if e["name"] == "thread_name"}
    assert lanes == {1: "host", 2: "device"}
    device = [e for e in spans if e["ph"] == "X" and e["tid"] == 2]
    host = {e["name"] for e in spans if e["ph"] == "X" and e["tid"] == 1}
    assert len(device) == 4
    assert all(e["dur"] >= 0 for e in device)
    assert host == {"receive", "plan", "launch", "wait", "commit"}
    gated.end_of(1)


def test_the_engine_error_reaches_the_request_in_words(running: Running) -> None:
    running.engine.crashes[0] = EngineError("out of memory")
    running.submit(1, [5])
    assert failed(running.end_of(1)).message == "out of memory"
