"""Writes to one client, and ends the call of a client that does not read.

Memory for a slow reader is bounded without a queue: a write is over once gRPC has the
message in its 64 KiB buffer, so at most one message waits here, and the tokens that come
meanwhile merge in the request's channel, a few bytes each and at most max_tokens of them.
What lies beyond (about 6 MB before a write blocks) is in the kernel's and the client's own
buffers. Time is bounded here: a client that lets one write wait for the limit is cut off.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from shared.errors import DeadlineExceededError, QueueFullError


class WritableContext(Protocol):
    """The part of a servicer context that writes."""

    def write(self, message: Any) -> Coroutine[Any, Any, None]: ...


class StreamWriter:
    """One client's stream. One write at a time: from the call's task, or begun by a callback.

    A write that a callback began is driven here rather than by a task: it begins at once, and
    is looked at again only when the next one wants to begin. That saves both of the task
    switches that a message costs otherwise.
    """

    def __init__(self, context: WritableContext, limit_s: float, cut: asyncio.Timeout) -> None:
        self._context = context
        self._limit_s = limit_s
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        # The write that was begun, and what it waits for.
        self._writing: Coroutine[Any, Any, None] | None = None
        self._awaited: asyncio.Future[Any] | None = None
        self._writing_since = 0.0
        # One timer for the stream's whole life: one for each write would cost more than
        # all the rest of this class.
        self._timer = self._loop.call_later(limit_s, self._look)

    async def write(self, message: Any) -> None:
        """Returns when it is written."""
        await self.drain()
        self._writing_since = self._loop.time()
        await self._context.write(message)
        self._writing_since = 0.0

    @property
    def is_free(self) -> bool:
        """Whether `begin` may be called. Raises what the write ended with, once."""
        while self._writing is not None:
            if self._awaited is not None and not self._awaited.done():
                return False
            self._go_on(self._writing)
        return True

    def begin(self, message: Any) -> None:
        """Begins to write, on a free writer."""
        assert self._writing is None
        self._writing_since = self._loop.time()
        self._writing = writing = self._context.write(message)
        self._go_on(writing)

    def when_free(self, callback: Callable[[], None]) -> None:
        """Calls it once, soon, when it is worth asking again; on a writer that is not free."""
        assert self._awaited is not None
        self._awaited.add_done_callback(lambda _: callback())

    async def drain(self) -> None:
        """Returns when the writer is free."""
        while not self.is_free:
            assert self._awaited is not None
            # Not the future itself: whoever drains may be cancelled, the write goes on.
            await asyncio.wait({self._awaited})

    def close(self) -> None:
        self._timer.cancel()
        self._tidy()

    def _go_on(self, writing: Coroutine[Any, Any, None]) -> None:
        self._awaited = None
        try:
            self._awaited = writing.send(None)
        except StopIteration:
            self._writing, self._writing_since = None, 0.0
        except BaseException:
            self._writing = None
            raise

    def _tidy(self) -> None:
        """Follows the write to its end in any case: gRPC's coroutine frees its buffers there."""
        try:
            if not self.is_free:
                self.when_free(self._tidy)
        # The call that the write was of has ended, and why was told.
        except (Exception, asyncio.CancelledError):
            return

    def _look(self) -> None:
        now = self._loop.time()
        is_over = self._awaited is not None and self._awaited.done()
        if self._writing_since and not is_over and now - self._writing_since >= self._limit_s:
            self._cut.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit_s, self._look)


@asynccontextmanager
async def stream_writer(context: WritableContext, limit_s: float) -> AsyncIterator[StreamWriter]:
    """The block is left with QueueFullError when the client does not read for the limit."""
    cut = asyncio.timeout(None)
    try:
        async with cut:
            writer = StreamWriter(context, limit_s, cut)
            try:
                yield writer
            finally:
                writer.close()
    except TimeoutError:
        if not cut.expired():
            raise
        raise QueueFullError(f"the client has not read for {limit_s:g} s") from None


@asynccontextmanager
async def deadline(timeout_s: float | None) -> AsyncIterator[None]:
    """The block is left with DeadlineExceededError when it takes longer. None: no limit."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceededError(f"not done within the deadline of {timeout_s:g} s") from None
