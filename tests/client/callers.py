"""The two clients behind one face, so that what holds for both is said once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol, Self

from tandem_client import AsyncClient, AsyncStream, Client, Event, Stream


class StreamCaller(Protocol):
    """A stream of either client."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    @property
    def request_id(self) -> str: ...

    def close(self) -> None: ...


class Caller(Protocol):
    """A client of either kind. Its methods are called by name, through `call`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def call(self, method: str, *args: Any, **options: Any) -> Any: ...

    def stream(self, *args: Any, **options: Any) -> StreamCaller: ...

    async def close(self) -> None: ...


class AsyncCaller:
    """`AsyncClient` as it is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.client = AsyncClient(*args, **options)

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__(None, None, None)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*args, **options)

    def stream(self, *args: Any, **options: Any) -> AsyncStream:
        return self.client.stream(*args, **options)

    async def close(self) -> None:
        await self.client.close()


class SyncCaller:
    """`Client` on threads, so that the servers of a test can share its event loop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.client = Client(*args, **options)

    async def __aenter__(self) -> Self:
        self.client.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.__exit__, None, None, None)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *args, **options)

    def stream(self, *args: Any, **options: Any) -> "SyncStreamCaller":
        return SyncStreamCaller(self.client.stream(*args, **options))

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


class SyncStreamCaller:
    """`Stream`, read on a thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await asyncio.to_thread(next, self._stream, None)
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        self._stream.close()


async def collect(stream: StreamCaller) -> list[Event]:
    """All events that are left of a stream."""
    return [event async for event in stream]
