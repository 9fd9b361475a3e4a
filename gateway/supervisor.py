"""Keeps several gateway processes running on one port, and serves their metrics as one.

Knows a process by its exit and by its bytes: on its stdin, which is a socket, it says that
it could serve, is told when to listen, and shows all along that its event loop runs. The first
ones listen at the same moment, for clients that come early and stay would all be with the
first. One that goes silent has hung: the kernel would go on to give it connections, so it is
killed.

Imports nothing of gRPC: the processes have an event loop and gRPC's threads each, their
parent has nothing that could break or block. They are started as commands rather than
through multiprocessing, because they share nothing but a port and a folder: there is
nothing to pickle, no resource tracker beside them, and each has an environment, a command
line and an exit code that a person can read.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from gateway.config import EXIT_BAD_CONFIGURATION, GatewayConfig
from gateway.shared_port import reserved_port
from shared.exporter import metrics_exporter
from shared.merged_metrics import FOLDER_VARIABLE, forget_gauges, merged_registry
from shared.metrics import SupervisorMetrics
from shared.tasks import TaskSet

EXIT_FAILED = 1

# What is said on a process's stdin.
ABLE = b"a"
ALIVE = b"."
LISTEN = b"l"
# How often a process shows that it lives.
SIGN_INTERVAL_S = 1.0

# Beyond the processes' own drain grace: whoever is still there then has hung.
_DRAIN_MARGIN_S = 10.0
# Until those that are able listen without the rest.
_FIRST_LISTEN_S = 10.0
# Looks in a row without a sign that make a process hung.
_MAX_SILENT_LOOKS = 10
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a process is started anew: after it died, or hung; and when none is any more."""

    # One that lived this long was well.
    settled_s: float = 5.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    # In a row, of one process and its successors, while no other is well. As long as one
    # is, its streams are worth more than an exit code, and the rest is tried for ever.
    max_early_deaths: int = 5
    # Without a sign of a process that has given some before.
    hang_s: float = 30.0

    def wait_s(self, num_early_deaths: int) -> float:
        return min(self.first_wait_s * 2.0**num_early_deaths, self.longest_wait_s)


@dataclass(frozen=True, slots=True)
class _Child:
    process: asyncio.subprocess.Process
    started_at: float
    hears: asyncio.StreamReader
    says: asyncio.StreamWriter
    # Set once it has said that it could serve.
    able: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """A process in each of some slots, from `run` to a signal."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        num_processes: int,
        *,
        drain_limit_s: float,
        policy: RestartPolicy | None = None,
        forwarded: Sequence[signal.Signals] = (),
        on_change: Callable[[int], None] = lambda _: None,
        on_loss: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`command` is that of a slot; the signals `forwarded` are handed on to all that are
        able and not to stop: before and after that, one may have no ear for them, and they
        would end it.

        `on_change` is told how many processes run now, `on_loss` the slot of one that
        ended by itself, before it is started anew.
        """
        self._command = command
        self._environment = dict(environment)
        self._num_processes = num_processes
        self._drain_limit_s = drain_limit_s
        self._forwarded = tuple(forwarded)
        self._policy = policy or RestartPolicy()
        self._on_change = on_change
        self._on_loss = on_loss
        self._children: dict[int, _Child] = {}
        # Of the first processes those that have not said yet that they could serve.
        self._unable = set(range(num_processes))
        self._all_able = asyncio.Event()
        self._stop = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Returns the exit code once no process is left; -N after a second signal N.

        0: told to stop, and all drained. EXIT_FAILED: one did not, or they kept dying.
        EXIT_BAD_CONFIGURATION: they say that they cannot work as they are told to.
        """
        with self._hearing_signals():
            async with asyncio.TaskGroup() as tasks:
                keepers = [
                    tasks.create_task(self._keep(slot)) for slot in range(self._num_processes)
                ]
                await self._stop.wait()
                self._signal_all(signal.SIGTERM)
                _, hung = await asyncio.wait(keepers, timeout=self._drain_limit_s)
                if hung:
                    _log.error("gateway processes killed", hung=len(hung))
                    self._exit_code = self._exit_code or EXIT_FAILED
                    self._signal_all(signal.SIGKILL)
        return self._exit_code

    async def _keep(self, slot: int) -> None:
        """A process in this slot until all stop."""
        num_early_deaths = 0
        while not self._stop.is_set():
            code, lived_s = await self._live(slot)
            if self._stop.is_set():
                # One that was still starting has no ear for the signal yet.
                if code not in (0, -signal.SIGTERM):
                    self._exit_code = self._exit_code or EXIT_FAILED
                return
            num_early_deaths = num_early_deaths + 1 if lived_s < self._policy.settled_s else 0
            wait_s = self._policy.wait_s(num_early_deaths)
            _log.error("gateway process lost", process=slot, ending=_ending(code), wait_s=wait_s)
            self._on_loss(slot)
            if num_early_deaths and not self._is_any_settled():
                self._give_up_after(num_early_deaths, code)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()

    async def _live(self, slot: int) -> tuple[int, float]:
        """One process from its start to its end: the exit code, and how long that took."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(slot),
                    stdin=theirs.fileno(),
                    env=self._environment,
                    # A group of its own, which Ctrl-C at the terminal does not reach: it is
                    # this process that says when to drain.
                    process_group=0,
                )
            except OSError as error:
                _log.error("gateway process not started", process=slot, error=str(error))
                return EXIT_FAILED, 0.0
            theirs.close()
            child = _Child(process, time.monotonic(), *await asyncio.open_connection(sock=ours))
            try:
                async with TaskSet() as tasks:
                    tasks.start(self._admit(slot, child), name=f"admit {slot}")
                    tasks.start(self._watch(slot, child), name=f"watch {slot}")
                    return await self._wait(slot, child)
            finally:
                child.says.close()

    async def _admit(self, slot: int, child: _Child) -> None:
        """Lets a process listen, together with the other first ones."""
        await child.able.wait()
        self._unable.discard(slot)
        if not self._unable:
            self._all_able.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LISTEN_S):
                await self._all_able.wait()
        child.says.write(LISTEN)

    async def _watch(self, slot: int, child: _Child) -> None:
        """Hears what a process says, and kills one that does not any more."""
        num_silent_looks, has_spoken = 0, False
        while num_silent_looks < _MAX_SILENT_LOOKS:
            try:
                async with asyncio.timeout(self._policy.hang_s / _MAX_SILENT_LOOKS):
                    heard = await child.hears.read(64)
            except TimeoutError:
                # Counted, not timed: after a pause of the whole machine, its signs are here.
                num_silent_looks += has_spoken
                continue
            except OSError:
                heard = b""
            if not heard:
                # It is dead, which is seen elsewhere.
                return
            num_silent_looks, has_spoken = 0, True
            if ABLE in heard:
                child.able.set()
        _log.error("gateway process hung", process=slot, silent_s=self._policy.hang_s)
        child.send_signal(signal.SIGKILL)

    async def _wait(self, slot: int, child: _Child) -> tuple[int, float]:
        self._children[slot] = child
        self._on_change(len(self._children))
        if self._stop.is_set():
            # Told to stop while it was being started.
            child.send_signal(signal.SIGTERM)
        try:
            return await child.process.wait(), child.age_s
        finally:
            del self._children[slot]
            self._on_change(len(self._children))

    def _is_any_settled(self) -> bool:
        return any(child.age_s >= self._policy.settled_s for child in self._children.values())

    def _give_up_after(self, num_early_deaths: int, code: int) -> None:
        """Ends all of it, if there is no point in going on."""
        if code == EXIT_BAD_CONFIGURATION:
            # Has said itself what is wrong; trying again changes nothing.
            self._exit_code = EXIT_BAD_CONFIGURATION
        elif num_early_deaths >= self._policy.max_early_deaths:
            self._exit_code = EXIT_FAILED
            print(
                f"tandem gateway: a gateway process ended {num_early_deaths} times within "
                f"{self._policy.settled_s:g} s of its start, the last time with {_ending(code)}",
                file=sys.stderr,
            )
        else:
            return
        self._stop.set()

    def _signal_all(self, number: int) -> None:
        for child in self._children.values():
            child.send_signal(number)

    def _forward(self, number: int) -> None:
        if self._stop.is_set():
            # One that ends has no ear for it any more, and it would look like a failure.
            return
        for child in self._children.values():
            if child.able.is_set():
                child.send_signal(number)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._exit_code = -number
            self._signal_all(signal.SIGKILL)
        else:
            _log.info("draining", processes=len(self._children))
            self._stop.set()

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_stop_signal, number)
        for number in self._forwarded:
            loop.add_signal_handler(number, self._forward, number)
        try:
            yield
        finally:
            for number in (*_STOP_SIGNALS, *self._forwarded):
                loop.remove_signal_handler(number)


def supervise(
    config: GatewayConfig,
    num_processes: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> int:
    """Runs the processes until they are told to stop. Returns the exit code.

    They read the settings that this process has read, from the same arguments and
    environment. Raises OSError when an address cannot be had.
    """
    with ExitStack() as stack:
        address = stack.enter_context(reserved_port(config.listen))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-gateway-")))
        registry = merged_registry(folder)
        metrics = SupervisorMetrics(registry)
        stack.enter_context(metrics_exporter(registry, config.metrics_host, config.metrics_port))
        counting = {FOLDER_VARIABLE: str(folder)} if config.metrics_port else {}

        def on_loss(slot: int) -> None:
            metrics.process_losses.inc()
            forget_gauges(folder, slot)

        supervisor = Supervisor(
            partial(_command, address, arguments),
            {**environment, **counting},
            num_processes,
            drain_limit_s=config.drain_grace_s + _DRAIN_MARGIN_S,
            # Where nothing listens for it, it ends this process, and the kernel the others.
            forwarded=(signal.SIGHUP,) if config.tokens_file else (),
            on_change=metrics.processes.set,
            on_loss=on_loss,
        )
        _log.info("supervising", listen=address, processes=num_processes)
        code = asyncio.run(supervisor.run())
    if code < 0:
        # As the signal would have ended a single process; whoever waits for this one sees it.
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    _log.info("stopped", exit_code=code)
    return code


def _command(address: str, arguments: Sequence[str], slot: int) -> list[str]:
    # Off the path stays what this process has off it: the current folder.
    isolation = ["-P"] if sys.flags.safe_path else []
    ours = [str(os.getpid()), str(slot), address]
    return [sys.executable, *isolation, "-m", "gateway.process", *ours, *arguments]


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
