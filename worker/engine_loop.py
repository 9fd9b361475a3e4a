"""The one thread that owns scheduler and engine.

Overlap: plan and launch step N+1 while N runs, then commit N. Serial: commit each step
before the next is planned. Both give the same tokens; overlap keeps the device busy while
the host works.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.errors import (
    AlreadyExistsError,
    EngineError,
    EngineLostError,
    ServingError,
    UnimplementedError,
)
from shared.types import StructuredOutput
from worker.messages import (
    Abort,
    CachedPrefixes,
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
from worker.step import Engine, Int32Array, StepHandle, StepPlan, StepResult
from worker.structured.outputs import StructuredOutputs
from worker.trace import StepTrace

_HEARTBEAT_S = 0.5
# A flood of commands must not hold up the steps; the rest is read a step later.
_MOST_COMMANDS_A_TURN = 1024
_TRACE_TIMEOUT_S = 30.0
# Between two tellings of what is cached.
_PREFIXES_S = 0.5

_log = logging.getLogger(__name__)


class CommandChannel(Protocol):
    """The receiving end, as multiprocessing.connection.Connection has it."""

    def poll(self, timeout: float) -> bool:
        """Waits until there is something to receive, or the other end is gone.

        May return False before the time is up.
        """
        ...

    def recv(self) -> Command:
        """Raises EOFError when the other end is gone."""
        ...


class FailedLaunch:
    """A step that the engine would not even take, so that it ends in its turn."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    def mask_buffer(self) -> None:
        return None

    def provide_masks(self, bitmasks: Int32Array) -> None:
        pass

    def result(self) -> StepResult:
        raise self._error


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight. A row's request is known here for as long as the step holds the row."""

    plan: StepPlan
    handle: StepHandle
    # Of the plan's masked rows.
    masked_uids: list[int]


class EngineLoop:
    """Commands in, events out. Closes neither engine nor channel nor structures.

    Without `structures` a request for structured output is refused. With them, the masks of
    step N+1 are made when step N is committed, while the device computes the forward of N+1.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        commands: CommandChannel,
        emit: Callable[[Event], None],
        *,
        overlap: bool,
        structures: StructuredOutputs | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._commands = commands
        self._emit_event = emit
        self._overlap = overlap
        self._structures = structures
        self._in_flight: _Launched | None = None
        self._traces: list[StepTrace] = []
        self._emitted_at = time.monotonic()
        self._prefixes_told_at = self._emitted_at
        self._was_idle = True
        # The last turn found nothing to do: there may be requests, but they wait.
        self._is_resting = True
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
        self._let_ready_run(now)
        plan = self._scheduler.plan(now)
        planned_at = time.monotonic()
        launched = None if plan is None else self._launch(plan)
        launched_at = time.monotonic()
        if plan is not None:
            self._trace_host("plan", now, planned_at, plan)
            self._trace_host("launch", planned_at, launched_at, plan)
        # Here, because the device has something to do meanwhile.
        self._tell_prefixes(launched_at)
        if self._overlap:
            launched, self._in_flight = self._in_flight, launched
        else:
            self._provide_masks(launched)
        self._is_resting = plan is None and launched is None
        if launched is not None:
            # Starts, rejections and aborts are known already, and a step can be long.
            self._tell()
        result = None if launched is None else self._commit(launched)
        if self._structures is not None and not self._structures.is_idle:
            self._structures.forget(self._scheduler.live_uids)
        if launched is not None and result is not None:
            self._accept(launched, result)
        if self._overlap:
            self._provide_masks(self._in_flight)
        self._tell()

    def _receive(self) -> None:
        """Takes the commands that are there; rests until one comes if nothing else is to do."""
        idle = self._scheduler.is_idle
        if idle and not self._was_idle:
            self._check_idle()
        self._was_idle = idle
        started_at = time.monotonic()
        timeout = max(0.0, self._rest_until() - started_at) if self._is_resting else 0.0
        for _ in range(_MOST_COMMANDS_A_TURN):
            if self._stopped or not self._poll(timeout):
                break
            timeout = 0.0
            self._take_one()
        if not idle:
            self._trace_host("receive", started_at, time.monotonic())

    def _rest_until(self) -> float:
        """When there will be something to do even if nobody asks for anything."""
        moments = [self._emitted_at + _HEARTBEAT_S]
        if (expiry := self._scheduler.next_expiry()) is not None:
            moments.append(expiry)
        if self._structures is not None and (due := self._structures.next_deadline()) is not None:
            moments.append(due)
        return min(moments)

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
        structure = request.structured_output
        try:
            self._scheduler.add(request, now, held=structure is not None)
        except AlreadyExistsError:
            # A failure would be taken for that of the first, which is to go on unaffected.
            _log.exception("uid %d was submitted twice; the second is ignored", request.uid)
        except ServingError as error:
            self._scheduler.reject(request.uid, error)
        except Exception:
            _log.exception("request %d could not be taken up", request.uid)
            fault = ServingError("the request could not be taken up; the worker's log has more")
            self._scheduler.reject(request.uid, fault)
        else:
            if structure is not None:
                self._begin_structure(request.uid, structure, now)

    def _begin_structure(self, uid: int, structure: StructuredOutput, now: float) -> None:
        """The request is held until its rule is compiled, so that it can be aborted and expire."""
        try:
            if self._structures is None:
                raise UnimplementedError("structured_output")
            if self._structures.begin(uid, structure, now):
                self._scheduler.release(uid)
        except ServingError as error:
            self._scheduler.fail_request(uid, error)
        except Exception:
            _log.exception("the structured output of request %d could not be begun", uid)
            # It is in the queue already, and nobody else would ever let it go.
            fault = ServingError(
                "the structured output could not be begun; the worker's log has more"
            )
            self._scheduler.fail_request(uid, fault)

    def _let_ready_run(self, now: float) -> None:
        if self._structures is None:
            return
        for uid, error in self._structures.take_ready(now):
            if error is None:
                self._scheduler.release(uid)
            else:
                self._scheduler.fail_request(uid, error)

    def _launch(self, plan: StepPlan) -> _Launched:
        uids: list[int] = []
        if len(plan.masked):
            uids = self._scheduler.uids_of(plan.rows[plan.masked]).tolist()
        try:
            return _Launched(plan, self._engine.launch(plan), uids)
        except EngineError as error:
            return _Launched(plan, FailedLaunch(error), uids)

    def _provide_masks(self, launched: _Launched | None) -> None:
        """What the step's rows may sample after all tokens that are committed."""
        if launched is None or not launched.masked_uids:
            return
        assert self._structures is not None, "nothing is masked without structures"
        started_at = time.monotonic()
        buffer = launched.handle.mask_buffer()
        bitmasks, faults = self._structures.fill(launched.masked_uids, buffer)
        launched.handle.provide_masks(bitmasks)
        for uid, error in faults:
            self._scheduler.fail_request(uid, error)
        self._trace_host("masks", started_at, time.monotonic(), launched.plan)

    def _accept(self, launched: _Launched, result: StepResult) -> None:
        """Lets the matchers go on by the tokens of requests that the commit has not ended."""
        if not launched.masked_uids:
            return
        assert self._structures is not None, "nothing is masked without structures"
        started_at = time.monotonic()
        token_ids = result.token_ids[launched.plan.masked].tolist()
        tokens = zip(launched.masked_uids, token_ids, strict=True)
        for uid, error in self._structures.accept(tokens):
            self._scheduler.fail_request(uid, error)
        self._trace_host("accept", started_at, time.monotonic(), launched.plan)

    def _commit(self, launched: _Launched) -> StepResult | None:
        """What was committed; None: the step failed."""
        plan = launched.plan
        waited_from = time.monotonic()
        try:
            result = launched.handle.result()
        except EngineError as error:
            _log.exception("step %d failed", plan.step_id)
            self._scheduler.fail(plan, error)
            if isinstance(error, EngineLostError):
                # Told first, so that the step's requests end with what happened to them.
                self._tell()
                raise
            return None
        now = time.monotonic()
        self._scheduler.commit(plan, result, now)
        if self._traces:
            self._trace_host("wait", waited_from, now, plan)
            self._trace_host("commit", now, time.monotonic(), plan)
            for trace in self._traces:
                trace.add_device(result.started_at, result.finished_at, step=plan.step_id)
        return result

    def _tell(self) -> None:
        now = time.monotonic()
        output = self._scheduler.drain_output(now)
        if output is not None:
            self._emit(output)
        elif now - self._emitted_at >= _HEARTBEAT_S or self._is_newly_idle:
            # When the last request is dropped or leaves its pages, nothing else says so.
            self._emit(Heartbeat(self._scheduler.load()))
        self._answer_traces(now)

    def _tell_prefixes(self, now: float) -> None:
        if now - self._prefixes_told_at < _PREFIXES_S:
            return
        self._prefixes_told_at = now
        fingerprints = self._scheduler.cached_prefixes()
        if fingerprints is not None:
            self._emit(CachedPrefixes(fingerprints))

    @property
    def _is_newly_idle(self) -> bool:
        return self._scheduler.is_idle and not self._was_idle

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
