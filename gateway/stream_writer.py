"""Writes to one client, and ends the call of a client that does not read.

Memory for a slow reader is bounded without a queue: a write returns once gRPC has the
message in its 64 KiB buffer, so at most one message waits here, and the tokens that come
meanwhile merge in the request's channel, a few bytes each and at most max_tokens of them.
What lies beyond (about 6 MB before a write blocks) is in the kernel's and the client's own
buffers. Time is bounded here: a client that lets one write wait for the limit is cut off.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from shared.errors import DeadlineExceededError, QueueFullError


class WritableContext(Protocol):
    """The part of a servicer context that writes."""

    async def write(self, message: Any) -> None: ...


class StreamWriter:
    """One client's stream, used by one task."""

    def __init__(self, context: WritableContext, limit_s: float, cut: asyncio.Timeout) -> None:
        self._context = context
        self._limit_s = limit_s
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._writing_since = 0.0
        # One timer for the stream's whole life: one for each write would cost more than
        # all the rest of this class.
        self._timer = self._loop.call_later(limit_s, self._look)

    async def write(self, message: Any) -> None:
        self._writing_since = self._loop.time()
        await self._context.write(message)
        self._writing_since = 0.0

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._writing_since and now - self._writing_since >= self._limit_s:
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
