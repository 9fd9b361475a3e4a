"""The one thread that owns scheduler and engine.

Overlap: plan and launch step N+1 while N runs, then commit N. Serial: commit each step
before the next is planned. Both give the same tokens; overlap keeps the device busy while
the host works.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from shared.errors import AlreadyExistsError, EngineError, EngineLostError, ServingError
from worker.messages import (
    Abort,
    CacheFlushed,
    Command,
    Event,
    Fatal,
    FlushCache,
    Heartbeat,
    NewRequest,
    Stop,
    Submit,
    Trace,
    Traced,
)
from worker.scheduler.integrity import IntegrityError
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine, StepHandle, StepPlan, StepResult
from worker.trace import StepTrace

_HEARTBEAT_S = 0.5
# A flood of commands must not hold up the steps; the rest is read a step later.
_MOST_COMMANDS_A_TURN = 1024
_TRACE_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)


class CommandChannel(Protocol):
    """The receiving end, as multiprocessing.connection.Connection has it."""

    def poll(self, timeout: float) -> bool:
        """Waits until there is something to receive, or the other end is gone."""
        ...

    def recv(self) -> Command:
        """Raises EOFError when the other end is gone."""
        ...


class FailedLaunch:
    """A step that the engine would not even take, so that it ends in its turn."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class EngineLoop:
    """Commands in, events out. Closes neither engine nor channel."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        commands: CommandChannel,
        emit: Callable[[Event], None],
        *,
        overlap: bool,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._commands = commands
        self._emit_event = emit
        self._overlap = overlap
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        self._traces: list[StepTrace] = []
        self._emitted_at = time.monotonic()
        self._was_idle = True
        self._stopped = False

    def run(self) -> None:
        """Blocks until Stop, until the other end is gone, or until a Fatal event."""
        try:
            while not self._stopped:
                self._turn()
        except _OtherEndGoneError:
            _log.info("the other end of the command channel is gone")
        except Exception as error:
            _log.exception("the engine loop cannot go on")
            self._leave_with(error)

    def _turn(self) -> None:
        self._receive()
        if self._stopped:
            return
        now = time.monotonic()
        self._scheduler.expire(now)
        plan = self._scheduler.plan(now)
        planned_at = time.monotonic()
        launched = None if plan is None else (plan, self._launch(plan))
        launched_at = time.monotonic()
        if plan is not None:
            self._trace_host("plan", now, planned_at, plan)
            self._trace_host("launch", planned_at, launched_at, plan)
        if self._overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            # Starts, rejections and aborts are known already, and a step can be long.
            self._tell()
            self._commit(*launched)
        self._tell()

    def _receive(self) -> None:
        """Takes the commands that are there; waits for one if there is nothing else to do."""
        idle = self._scheduler.is_idle
        if idle and not self._was_idle:
            self._check_idle()
        self._was_idle = idle
        started_at = time.monotonic()
        timeout = max(0.0, self._emitted_at + _HEARTBEAT_S - started_at) if idle else 0.0
        for _ in range(_MOST_COMMANDS_A_TURN):
            if self._stopped or not self._poll(timeout):
                break
            timeout = 0.0
            self._take_one()
        if not idle:
            self._trace_host("receive", started_at, time.monotonic())

    def _poll(self, timeout: float) -> bool:
        try:
            return self._commands.poll(timeout)
        except (EOFError, OSError) as error:
            raise _OtherEndGoneError from error

    def _take_one(self) -> None:
        try:
            command = self._commands.recv()
        except (EOFError, OSError) as error:
            raise _OtherEndGoneError from error
        except Exception:
            _log.exception("a command could not be read")
            return
        try:
            self._obey(command)
        except (ServingError, TypeError, ValueError):
            # One bad command must not take all the other requests with it. Any other
            # error means that the books may be half changed, and nothing can go on.
            # Not its content, which may be a prompt.
            _log.exception("a %s command failed", type(command).__name__)

    def _obey(self, command: Command) -> None:
        now = time.monotonic()
        match command:
            case Submit(request):
                self._submit(request, now)
            case Abort(uids, report):
                self._scheduler.abort(uids, report, now)
            case FlushCache(call_id):
                self._emit(CacheFlushed(call_id, self._scheduler.flush_cache()))
            case Trace(call_id, num_steps):
                self._traces.append(StepTrace(call_id, num_steps, now + _TRACE_TIMEOUT_S))
            case Stop():
                self._stopped = True
            case _:
                raise TypeError(f"unknown command {type(command).__name__}")

    def _submit(self, request: NewRequest, now: float) -> None:
        try:
            self._scheduler.add(request, now)
        except AlreadyExistsError:
            # A failure would be taken for that of the first, which is to go on unaffected.
            _log.exception("uid %d was submitted twice; the second is ignored", request.uid)
        except ServingError as error:
            self._scheduler.reject(request.uid, error)
        except Exception:
            _log.exception("request %d could not be taken up", request.uid)
            fault = ServingError("the request could not be taken up; the worker's log has more")
            self._scheduler.reject(request.uid, fault)

    def _launch(self, plan: StepPlan) -> StepHandle:
        try:
            return self._engine.launch(plan)
        except EngineError as error:
            return FailedLaunch(error)

    def _commit(self, plan: StepPlan, handle: StepHandle) -> None:
        waited_from = time.monotonic()
        try:
            result = handle.result()
        except EngineError as error:
            _log.exception("step %d failed", plan.step_id)
            self._scheduler.fail(plan, error, time.monotonic())
            if isinstance(error, EngineLostError):
                # Told first, so that the step's requests end with what happened to them.
                self._tell()
                raise
            return
        now = time.monotonic()
        self._scheduler.commit(plan, result, now)
        if self._traces:
            self._trace_host("wait", waited_from, now, plan)
            self._trace_host("commit", now, time.monotonic(), plan)
            for trace in self._traces:
                trace.add_device(result.started_at, result.finished_at, step=plan.step_id)

    def _tell(self) -> None:
        now = time.monotonic()
        output = self._scheduler.drain_output(now)
        if output is not None:
            self._emit(output)
        elif now - self._emitted_at >= _HEARTBEAT_S:
            self._emit(Heartbeat(self._scheduler.load()))
        self._answer_traces(now)

    def _answer_traces(self, now: float) -> None:
        for trace in list(self._traces):
            if trace.is_complete or now >= trace.expires_at:
                self._traces.remove(trace)
                self._emit(Traced(trace.call_id, trace.to_json_gz()))

    def _emit(self, event: Event) -> None:
        try:
            self._emit_event(event)
        except OSError as error:
            raise _OtherEndGoneError from error
        self._emitted_at = time.monotonic()

    def _trace_host(
        self, name: str, started_at: float, finished_at: float, plan: StepPlan | None = None
    ) -> None:
        if not self._traces:
            return
        args = {}
        if plan is not None:
            args = {"step": plan.step_id, "rows": plan.num_rows, "tokens": plan.num_tokens}
        for trace in self._traces:
            trace.add_host(name, started_at, finished_at, **args)

    def _check_idle(self) -> None:
        try:
            self._scheduler.check_idle()
        except IntegrityError as error:
            _log.error("idle, but %s: the scheduler leaks", error)

    def _leave_with(self, error: Exception) -> None:
        try:
            self._emit(Fatal(f"{type(error).__name__}: {error}"))
        except _OtherEndGoneError:
            _log.info("nobody is left to hear of it")


class _OtherEndGoneError(Exception):
    """The front process has closed the pipe, or died."""
