"""The engine process as its parent sees it: spawned, listened to, replaced, ended.

`EngineProcess` is one spawned process with its pipe; `EngineSupervisor` keeps one alive.
Neither knows what the messages mean beyond whether the process is well.
"""

import asyncio
import multiprocessing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import structlog

from worker.config import EXIT_BAD_CONFIGURATION
from worker.messages import Command, Event, Fatal, Progress, Ready, Stop
from worker.pipe import FrontPipe

_KILL_AFTER_EOF_S = 2.0
_LAST_WORDS_S = 1.0

_log = structlog.get_logger(__name__)


class EngineStartError(Exception):
    """The engine cannot be brought up, or not kept up; the worker must end.

    `is_configuration` says that what was asked for is at fault.
    """

    def __init__(self, message: str, *, is_configuration: bool = False) -> None:
        super().__init__(message)
        self.is_configuration = is_configuration


class EngineListener(Protocol):
    """Who is told what the engine says and how it fares; every call is on the loop."""

    def on_event(self, event: Event) -> None: ...

    def on_engine_stale(self, silent_s: float) -> None:
        """No sign of it for too long; the next event ends this."""
        ...

    def on_engine_lost(self) -> None:
        """The process is gone, and with it every request it had."""
        ...


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` in any `window_s`, each after twice the wait of the one before."""

    max_restarts: int = 4
    window_s: float = 300.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0

    def wait_s(self, num_recent: int) -> float:
        return min(self.first_wait_s * 2.0**num_recent, self.longest_wait_s)


class EngineProcess:
    """One spawned engine process, alive from construction on.

    `target(*arguments, connection)` runs in the process. Must be built on the main thread:
    the child asks the kernel to die with the thread that started it.
    """

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe(duplex=True)
        self.process: BaseProcess = context.Process(
            target=target, args=(*arguments, theirs), name="tandem-engine"
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Kills it if it is alive, and reaps it. Blocks for a moment."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class EngineSupervisor:
    """Keeps one engine process running until told to stop."""

    def __init__(
        self,
        spawn: Callable[[], EngineProcess],
        *,
        heartbeat_timeout_s: float,
        hang_timeout_s: float,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self._spawn = spawn
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._restarts = restarts or RestartPolicy()
        self._pipe: FrontPipe | None = None
        self._process: BaseProcess | None = None
        self._gone = asyncio.Event()
        self._last_event_at = 0.0
        self._is_ready = False
        self._may_restart = True
        self._is_stopping = False
        self._fatal = ""

    def send(self, command: Command) -> None:
        """Never blocks. Lost when no process is up; the listener was told of that."""
        if self._pipe is not None:
            self._pipe.send(command)

    def stop_restarting(self) -> None:
        """From now on a lost process is not replaced."""
        self._may_restart = False

    async def run(self, first: EngineProcess, listener: EngineListener) -> None:
        """Supervises `first` and its successors; returns after `stop`.

        Raises EngineStartError when there is no point in going on. However it ends, no
        process is left.
        """
        recent: deque[float] = deque()
        child = first
        while self._may_restart:
            await self._live(child, listener)
            if not self._may_restart:
                return
            wait_s = self._next_wait_s(recent)
            _log.warning("engine restarts", wait_s=wait_s, recent=len(recent))
            await asyncio.sleep(wait_s)
            if not self._may_restart:
                return
            # Here and not on a helper thread, although it blocks for some ms (nothing
            # lives that could be slowed): the child dies with the thread that started it.
            child = self._spawn()
        child.end()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Tells the process to leave and waits; kills it when it takes too long.

        One that is not ready yet is killed at once: it has nothing to lose.
        """
        self._may_restart, self._is_stopping = False, True
        process, gone = self._process, self._gone
        if process is None:
            return
        if self._is_ready:
            self.send(Stop())
            await _happens(gone, timeout_s)
        if not gone.is_set():
            process.kill()
            await gone.wait()

    def _next_wait_s(self, recent: deque[float]) -> float:
        now = asyncio.get_running_loop().time()
        while recent and now - recent[0] > self._restarts.window_s:
            recent.popleft()
        if len(recent) >= self._restarts.max_restarts:
            raise EngineStartError(
                f"the engine process was lost {len(recent) + 1} times within "
                f"{self._restarts.window_s:.0f} s"
            )
        wait_s = self._restarts.wait_s(len(recent))
        recent.append(now)
        return wait_s

    async def _live(self, child: EngineProcess, listener: EngineListener) -> None:
        """One process from its start to its end; the listener knows of it on return."""
        process, gone, closed = child.process, asyncio.Event(), asyncio.Event()
        self._process, self._gone = process, gone
        self._fatal, self._is_ready = "", False
        loop = asyncio.get_running_loop()
        self._last_event_at = loop.time()

        def on_exit() -> None:
            loop.remove_reader(process.sentinel)
            gone.set()

        loop.add_reader(process.sentinel, on_exit)
        try:
            self._pipe = await FrontPipe.open(
                child.connection, partial(self._hear, listener), closed.set
            )
            async with asyncio.TaskGroup() as tasks:
                watches = (
                    tasks.create_task(
                        self._watch_heartbeat(process, listener), name="engine heartbeat"
                    ),
                    tasks.create_task(_kill_after_eof(process, closed), name="engine pipe"),
                )
                await gone.wait()
                # Its last words may still be in the pipe.
                await _happens(closed, _LAST_WORDS_S)
                for watch in watches:
                    watch.cancel()
        finally:
            loop.remove_reader(process.sentinel)
            self._close_pipe()
            self._process = None
            child.end()
        self._mourn(process, listener)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _mourn(self, process: BaseProcess, listener: EngineListener) -> None:
        was_ready, self._is_ready = self._is_ready, False
        if self._is_stopping:
            listener.on_engine_lost()
            return
        reason = self._fatal or f"the engine process died ({_ending(process)})"
        _log.error("engine lost", reason=reason, exit_code=process.exitcode)
        listener.on_engine_lost()
        # Asked for something impossible: starting it again would change nothing.
        if not was_ready and process.exitcode == EXIT_BAD_CONFIGURATION:
            raise EngineStartError(reason, is_configuration=True)

    def _hear(self, listener: EngineListener, event: Event) -> None:
        self._last_event_at = asyncio.get_running_loop().time()
        match event:
            case Progress(message=message):
                _log.info("engine progress", message=message)
            case Fatal(message=message):
                self._fatal = message
            case Ready():
                self._is_ready = True
        listener.on_event(event)

    async def _watch_heartbeat(self, process: BaseProcess, listener: EngineListener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._heartbeat_timeout_s / 4)
            silent_s = loop.time() - self._last_event_at
            # Loading may be silent for as long as a download takes.
            if self._is_ready and silent_s > self._heartbeat_timeout_s:
                listener.on_engine_stale(silent_s)
            if self._is_ready and silent_s > self._hang_timeout_s:
                # Requests without a deadline would wait for it for ever.
                self._fatal = f"the engine process was silent for {silent_s:.0f} s and was killed"
                process.kill()
                return


async def _kill_after_eof(process: BaseProcess, closed: asyncio.Event) -> None:
    """A process that closed its pipe is of no use, even if it lives on."""
    await closed.wait()
    await asyncio.sleep(_KILL_AFTER_EOF_S)
    process.kill()


async def _happens(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set or the time is up."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def _ending(process: BaseProcess) -> str:
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
