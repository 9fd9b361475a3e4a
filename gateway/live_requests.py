"""The requests that live in this gateway: how many, under which ids, and how to end them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gateway.backoff import RETRY_AFTER_MS
from gateway.channel import RequestChannel
from shared.errors import AlreadyExistsError, QueueFullError, ServingError, UnavailableError

_T = TypeVar("_T")


class AbortedEarlyError(Exception):
    """The Abort call came before the request was sent to a worker."""


class LiveRequest:
    """One request, from its admission to its end."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        # Whether no other worker may be tried.
        self.is_final = False
        self.is_aborted = False
        # Of those of its completions that a worker has.
        self._channels: set[RequestChannel] = set()
        self._work: asyncio.Future[object] | None = None
        self._ended_by: ServingError | AbortedEarlyError | None = None

    def abort(self) -> None:
        """It ends OK, as aborted. Idempotent."""
        self.is_aborted = True
        for channel in self._channels:
            channel.request_abort()
        if not self._channels:
            self._end_early(AbortedEarlyError())

    def fail(self, error: ServingError) -> None:
        """It ends with this error, unless it has ended, and is not tried again."""
        self.is_final = True
        for channel in self._channels:
            channel.finish(error)
        if not self._channels:
            self._end_early(error)

    async def uninterrupted(self, work: "asyncio.Future[_T]") -> _T:
        """The work's result. Raises what ended the request, if that came first."""
        self._work = work  # type: ignore[assignment]
        try:
            result = await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended_by is None or (task is not None and task.cancelling()):
                raise
            raise self._ended_by from None
        finally:
            self._work = None
        if self._ended_by is not None:
            # It ended when the work was done already, and could not be cancelled any more.
            raise self._ended_by
        return result

    def check_goes_on(self) -> None:
        """Raises the error that ended it while no worker had it, if one did."""
        if isinstance(self._ended_by, ServingError):
            raise self._ended_by

    @contextmanager
    def served_by(self, channel: RequestChannel) -> Iterator[None]:
        """From here to the block's end, the worker is told of an abort."""
        self._channels.add(channel)
        try:
            yield
        finally:
            self._channels.discard(channel)

    def _end_early(self, error: ServingError | AbortedEarlyError) -> None:
        self._ended_by = error
        if self._work is not None:
            self._work.cancel()


class LiveRequests:
    """Admits requests up to a bound, and none once the gateway drains."""

    def __init__(self, max_live: int, on_change: Callable[[int], None] = lambda _: None) -> None:
        """`on_change` is told how many live, once for each begin and end."""
        self._max_live = max_live
        self._on_change = on_change
        self._by_id: dict[str, LiveRequest] = {}
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def admit(self, request_id: str) -> Iterator[LiveRequest]:
        """The id is taken until the block's end.

        Raises UnavailableError, AlreadyExistsError or QueueFullError, at once.
        """
        if self._is_draining:
            raise UnavailableError("the gateway is shutting down", retry_after_ms=RETRY_AFTER_MS)
        if request_id in self._by_id:
            raise AlreadyExistsError(
                f"request_id: a live request has the id {request_id!r}", field="request_id"
            )
        if len(self._by_id) >= self._max_live:
            raise QueueFullError(
                f"the gateway serves at most {self._max_live} requests at once",
                retry_after_ms=RETRY_AFTER_MS,
            )
        request = LiveRequest(request_id)
        self._by_id[request_id] = request
        self._idle.clear()
        self._on_change(len(self._by_id))
        try:
            yield request
        finally:
            del self._by_id[request_id]
            self._on_change(len(self._by_id))
            if not self._by_id:
                self._idle.set()

    def abort(self, request_id: str) -> bool:
        """Whether a live request has this id."""
        request = self._by_id.get(request_id)
        if request is None:
            return False
        request.abort()
        return True

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests; returns when the live ones have ended.

        Those that live at the end of the grace fail with UnavailableError.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            error = UnavailableError(f"the gateway shut down after a grace of {grace_s:g} s")
            for request in list(self._by_id.values()):
                request.fail(error)
