"""An owner for tasks that come and go, where a TaskGroup's one block does not fit."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


class TaskSet:
    """Keeps every task it starts until that task is done; ends them all on exit.

    A task that fails is logged and told to `on_error`; it never takes others with it.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException], None] | None = None,
        *,
        cancel_again_s: float = 5.0,
    ) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error
        # Longer than any `finally` of ours takes.
        self._cancel_again_s = cancel_again_s

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Cancels every task and returns when the last one's `finally` has run."""
        mine = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not mine]:
            for task in tasks:
                task.cancel()
            # Again for whoever has not heard it: before Python 3.13 a TaskGroup raises its
            # children's errors and forgets a cancellation that came at the same time.
            await asyncio.wait(tasks, timeout=self._cancel_again_s)

    async def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the tasks to end by themselves; False when time ran out first."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while self._tasks:
            left = None
            if deadline is not None:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return False
            await asyncio.wait(set(self._tasks), timeout=left)
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        _log.error("background task failed", task=task.get_name(), exc_info=error)
        if self._on_error is not None:
            self._on_error(error)


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them has returned, and cancels the others. Raises what it raised."""
    async with TaskSet() as tasks:
        running = [tasks.start(work, name=f"first of {len(works)}") for work in works]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
