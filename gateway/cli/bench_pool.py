"""The client processes of a benchmark, as their parent sees them."""

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

from gateway.cli.bench_client import ClientTask, Go, Progress, Ready, Report, Result, run_clients
from shared.notifier import Notifier


class BenchError(Exception):
    """The benchmark itself could not be run."""


class ClientPool:
    """Starts a process for each task; all of them are gone on leaving, however that is."""

    def __init__(self, tasks: Sequence[ClientTask]) -> None:
        self._tasks = tasks
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._progress: dict[int, Progress] = {}
        self._ready: set[int] = set()
        self._results: dict[int, Result] = {}
        self._lost: list[int] = []
        # Told of every report.
        self.news = Notifier()

    @property
    def num_messages(self) -> int:
        return sum(progress.num_messages for progress in self._progress.values())

    @property
    def num_flowing(self) -> int:
        """Requests that have had a token."""
        return sum(progress.num_flowing for progress in self._progress.values())

    @property
    def results(self) -> Sequence[Result]:
        return tuple(self._results.values())

    @property
    def is_done(self) -> bool:
        return len(self._results) == len(self._tasks) or bool(self._lost)

    async def __aenter__(self) -> Self:
        # Not forked: gRPC's threads do not survive that.
        context = multiprocessing.get_context("spawn")
        loop = asyncio.get_running_loop()
        for index, task in enumerate(self._tasks):
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(
                target=run_clients, args=(task, theirs), name=f"bench-client-{index}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            loop.add_reader(ours.fileno(), self._hear, index)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for process, connection in zip(self._processes, self._connections, strict=True):
            loop.remove_reader(connection.fileno())
            process.kill()
            process.join()
            connection.close()

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises BenchError."""
        num_tasks = len(self._tasks)
        await self._within(timeout_s, lambda: len(self._ready) == num_tasks, "to connect")

    def go(self) -> None:
        """Lets all clients send their first request."""
        for connection in self._connections:
            connection.send(Go())

    async def wait_done(self, timeout_s: float) -> None:
        """Raises BenchError."""
        await self._within(timeout_s, lambda: self.is_done, "to end")

    async def _within(self, timeout_s: float, is_true: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.until(lambda: is_true() or bool(self._lost))
        except TimeoutError:
            raise BenchError(f"the clients took more than {timeout_s:g} s {what}") from None
        if self._lost:
            code = self._processes[self._lost[0]].exitcode
            raise BenchError(f"a client process was lost (exit code {code})")

    def _hear(self, index: int) -> None:
        try:
            report: Report = self._connections[index].recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connections[index].fileno())
            if index not in self._results:
                self._processes[index].join(1)
                self._lost.append(index)
                self.news.notify()
            return
        match report:
            case Ready():
                self._ready.add(index)
            case Progress():
                self._progress[index] = report
            case Result():
                self._results[index] = report
        self.news.notify()
