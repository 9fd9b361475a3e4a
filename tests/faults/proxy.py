"""A network between a client and a server, that a test can slow down, silence and cut."""

import asyncio
import random
from types import TracebackType
from typing import Self

from shared.tasks import TaskSet

_CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Passes bytes on to `target`, as well as it is told to."""

    def __init__(self, target: str) -> None:
        self.target = target
        # Most that a chunk is held up, each way; they keep their order.
        self.delay_s = 0.0
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps = TaskSet()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self._pumps.__aenter__()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._pumps.__aexit__(exc_type, exc, traceback)

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def stall(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flows.clear()

    def resume(self) -> None:
        """What was held up passes."""
        self._flows.set()

    def cut(self) -> int:
        """Ends every connection without a word. How many there were."""
        num_connections = len(self._writers) // 2
        for writer in self._writers:
            writer.transport.abort()
        return num_connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            their_reader, their_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, their_writer}
        self._pumps.start(self._pump(reader, their_writer), name="up")
        self._pumps.start(self._pump(their_reader, writer), name="down")

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(random.uniform(0, self.delay_s))
                await self._flows.wait()
                writer.write(chunk)
                await writer.drain()
        except OSError:
            # The other half's end is told by its transport, below.
            pass
        finally:
            writer.close()
            self._writers.discard(writer)
