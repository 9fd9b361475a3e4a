"""The front's end of the pipe to the engine process, on the event loop.

The engine's end is a plain `multiprocessing.connection.Connection`; this end speaks its
framing (a 4-byte big-endian length, then the pickle) through the loop's own transport, so
that neither direction ever blocks the loop or needs a thread.
"""

import asyncio
import os
import pickle
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

_HEADER = struct.Struct("!i")
# Where the length did not fit in 31 bits: -1, then 8 bytes of it. Only a damaged stream or
# a bundle that no gateway could take would need it.
MAX_FRAME_BYTES = (1 << 31) - 1


class FrameDecoder:
    """Bytes as they come in, whole pickles out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Any]:
        """The objects that this chunk completes. Raises ValueError on a bad length."""
        # A step's output comes whole in one chunk nearly always: no copy then.
        if not self._buffer and len(chunk) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(chunk)
            if len(chunk) == _HEADER.size + size:
                return [pickle.loads(memoryview(chunk)[_HEADER.size :])]
        self._buffer += chunk
        return list(self._complete())

    def _complete(self) -> list[Any]:
        objects, at = [], 0
        view = memoryview(self._buffer)
        while len(view) - at >= _HEADER.size:
            (size,) = _HEADER.unpack_from(view, at)
            if size < 0:
                raise ValueError(f"a frame of length {size}")
            end = at + _HEADER.size + size
            if end > len(view):
                break
            objects.append(pickle.loads(view[at + _HEADER.size : end]))
            at = end
        view.release()
        del self._buffer[:at]
        return objects


class FrontPipe(asyncio.Protocol):
    """Objects to and from the engine process.

    What is sent and not yet taken waits in the transport's buffer. Its size is bounded by
    the callers: a request is sent only when the front has admitted it.
    """

    def __init__(self, on_object: Callable[[Any], None], on_closed: Callable[[], None]) -> None:
        self._on_object = on_object
        self._on_closed = on_closed
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        connection: Connection,
        on_object: Callable[[Any], None],
        on_closed: Callable[[], None],
    ) -> "FrontPipe":
        """Takes over the connection, which must be one end of a duplex pipe."""
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, pipe = await loop.create_unix_connection(lambda: cls(on_object, on_closed), sock=sock)
        return pipe

    def send(self, message: object) -> None:
        """Never blocks; dropped silently when the pipe is closed, which `on_closed` tells."""
        if self._transport is None or self._transport.is_closing():
            return
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._transport.write(_HEADER.pack(len(body)) + body)

    def close(self) -> None:
        """The engine sees the end of the pipe once everything sent has been taken."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._on_object(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()
