"""Both ends of the pipe between the front and the engine process, of which no end ever waits.

The framing is that of `multiprocessing.connection.Connection` (a 4-byte big-endian length,
then the pickle), with which the engine reads its commands. The front speaks it through the
loop's own transport, the engine's thread by writes that do not block.
"""

import asyncio
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

from worker.messages import Event
from worker.output_merging import merged

_HEADER = struct.Struct("!i")


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
                # -1 announces a frame of 2 GiB or more, which none of ours is.
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
        self._transport.write(_frame(message))

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


class EnginePipe:
    """Events to the front, sent by the engine's thread without ever waiting for the front.

    What the front does not take at once waits here, and a thread of its own sends it, merged.
    No event is lost. Nor are they without bound: the front, which would have to read, is also
    who brings the requests, and each gives so many tokens and no more (12 bytes each, with
    log-probabilities up to 180).
    """

    def __init__(self, connection: Connection) -> None:
        """The connection remains its owner's, to read from."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._lock = threading.Lock()
        self._backlog: list[Event] = []
        # Has the socket for itself while there is one.
        self._sender: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, event: Event) -> None:
        """Raises OSError when the front is gone."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._sender is not None:
                self._backlog.append(event)
                return
            rest = self._send_some(memoryview(_frame(event)))
            if rest:
                self._sender = threading.Thread(
                    target=self._send_backlog, args=(rest,), name="events", daemon=True
                )
                self._sender.start()

    def close(self, timeout_s: float) -> None:
        """Gives what waits so much time to go; after it, the front sees the end of the pipe."""
        sender = self._sender
        if sender is not None:
            sender.join(timeout_s)
            if sender.is_alive():
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                sender.join()
        self._socket.close()

    def _send_some(self, data: memoryview) -> memoryview:
        """What is left of it."""
        while data:
            try:
                data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                break
        return data

    def _send_backlog(self, rest: memoryview) -> None:
        try:
            while True:
                self._send_all(rest)
                with self._lock:
                    if not self._backlog:
                        self._sender = None
                        return
                    events, self._backlog = self._backlog, []
                rest = memoryview(b"".join(map(_frame, merged(events))))
        except OSError as error:
            with self._lock:
                self._error = error
                self._backlog, self._sender = [], None

    def _send_all(self, data: memoryview) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while data:
            room.poll()
            data = self._send_some(data)


def _frame(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body
