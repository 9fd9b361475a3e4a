"""A worker and a gateway as child processes: start, wait until they serve, drain, stop.

Knows both services by their flags and their health alone.
"""

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.cli.child import child_command
from shared.grpc_options import channel_options
from shared.tasks import TaskSet

# Above the services' own drain grace: whoever is still there then has hung.
STOP_TIMEOUT_S = 60.0

_POLL_S = 0.1
_LAST_LINES_S = 1.0
_TAIL_LINES = 20

# Told the service's name and one line of its output.
OnLine = Callable[[str, str], None]


class ServiceError(Exception):
    """A service that did not start or stopped by itself; its exit code, its last lines."""

    def __init__(self, message: str, *, exit_code: int = 1, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.lines = lines


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """What to run: a module of ours that serves gRPC on `address`."""

    module: str
    address: str
    arguments: Sequence[str] = ()


def require_free(address: str) -> None:
    """Raises ServiceError when something listens on `address` already."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            return
    except OSError as error:
        raise ServiceError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from None


def free_address(host: str = "127.0.0.1") -> str:
    """An address nobody listens on now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return f"{host}:{sock.getsockname()[1]}"


class Service:
    """One child process. Its output is read to the end and told line by line."""

    def __init__(
        self, command: ServiceCommand, on_line: OnLine, on_exit: Callable[[], None]
    ) -> None:
        self.name = command.module
        self.address = command.address
        self.exit_code: int | None = None
        self._command = command
        self._on_line = on_line
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._exited = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return self._process.pid if self._process else None

    async def start(self, tasks: TaskSet) -> None:
        """Starts the process; `tasks` gets the ones that read it and see it exit."""
        # A pipe of our own: asyncio's counts a process as running for as long as a
        # grandchild has the pipe open.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *child_command(self.name, "--listen", self.address, *self._command.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                # A group of its own, which Ctrl-C at the terminal does not reach: the
                # parent says who stops first.
                process_group=0,
            )
        finally:
            os.close(write_end)
        tasks.start(self._read(read_end), name=f"read {self.name}")
        tasks.start(self._wait(), name=f"wait {self.name}")

    def raise_if_exited(self) -> None:
        """Raises ServiceError with the exit code and the last lines."""
        if self.exit_code is None:
            return
        code = self.exit_code
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        # Shells report a signal as 128 + its number; 0 is no success for a service.
        raise ServiceError(
            f"{self.name} ended by itself with {how}",
            exit_code=(code or 1) if code >= 0 else 128 - code,
            lines=self.last_lines(),
        )

    def last_lines(self) -> Sequence[str]:
        """The end of its output."""
        return tuple(self._tail)

    def send_signal(self, number: int) -> None:
        """Signals the process; nothing when it has exited."""
        if self._process is not None and self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the process and whatever it started, at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, the service's own drain, and an end by force when that takes too long."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._exited.wait()
        except TimeoutError:
            self.kill()
            await self._exited.wait()

    async def _read(self, read_end: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        rest = b""
        try:
            while chunk := await reader.read(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._tell(line)
        finally:
            if rest:
                self._tell(rest)
            transport.close()

    async def _wait(self) -> None:
        assert self._process is not None
        try:
            self.exit_code = await self._process.wait()
        finally:
            # Whatever of its group is left now is an orphan. Also when this task is
            # cancelled: `stop` must not wait for what nobody would tell it.
            self.kill()
            self._exited.set()
        self._on_exit()

    def _tell(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._tail.append(text)
        self._on_line(self.name, text)


class Pair:
    """The two services of one machine; made by `running_pair`."""

    def __init__(self, worker: ServiceCommand, gateway: ServiceCommand, on_line: OnLine) -> None:
        self._any_exit = asyncio.Event()
        self.worker = Service(worker, on_line, self._any_exit.set)
        self.gateway = Service(gateway, on_line, self._any_exit.set)
        self.is_stopping = False

    async def wait_serving(
        self, service: Service, timeout_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Returns when the service's health says SERVING; tells of each time it did not.

        Raises ServiceError when either service ends first or time runs out.
        """
        deadline = time.monotonic() + timeout_s
        options = channel_options(max_reconnect_backoff_ms=200)
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not await _is_serving(stub):
                self._raise_if_exited()
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"{service.name} was not ready within {timeout_s:g} s",
                        lines=service.last_lines(),
                    )
                on_wait()
                await asyncio.sleep(_POLL_S)

    async def wait_exit(self) -> None:
        """Raises ServiceError when one of the two ends."""
        await self._any_exit.wait()
        self._raise_if_exited()

    async def stop(self) -> None:
        """Drains the gateway, then stops the worker."""
        self.is_stopping = True
        await self.gateway.stop()
        await self.worker.stop()

    def kill(self) -> None:
        self.gateway.kill()
        self.worker.kill()

    def _raise_if_exited(self) -> None:
        self.worker.raise_if_exited()
        self.gateway.raise_if_exited()


@asynccontextmanager
async def running_pair(
    worker: ServiceCommand, gateway: ServiceCommand, on_line: OnLine
) -> AsyncGenerator[Pair, None]:
    """Starts both and stops both at the end; waiting until they serve is the caller's."""
    pair = Pair(worker, gateway, on_line)
    async with TaskSet() as tasks:
        try:
            await pair.worker.start(tasks)
            await pair.gateway.start(tasks)
            yield pair
        finally:
            await pair.stop()
            # The last lines may still be in the pipes.
            await tasks.join(_LAST_LINES_S)


async def _is_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
