"""Of many wakes that gRPC has written, the loop takes all at once, and misses none."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc
import uvloop

from shared.event_loop import is_grpcs_reader, new_event_loop


class PollerCompletionQueue:
    """As gRPC's: takes one byte, and then every event that is there."""

    def __init__(self, wakes: socket.socket) -> None:
        self._wakes = wakes
        self.waiting: list[int] = []
        self.taken: list[list[int]] = []
        self.has_taken = asyncio.Event()

    def handle_events(self, _: Any) -> None:
        assert len(self._wakes.recv(1)) == 1
        taken, self.waiting = self.waiting, []
        self.taken.append(taken)
        self.has_taken.set()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


def test_many_wakes_are_one_turn() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        queue, loop = PollerCompletionQueue(ours), asyncio.get_running_loop()
        loop.add_reader(ours, partial(queue.handle_events, loop))
        with ours, theirs:
            for number in range(100):
                queue.waiting.append(number)
                theirs.send(b"1")
            await queue.has_taken.wait()
            # Another reader's turn: what was left over would have come before it.
            theirs.send(b"1")
            queue.has_taken.clear()
            queue.waiting.append(100)
            await queue.has_taken.wait()
            loop.remove_reader(ours)
        assert queue.taken == [list(range(100)), [100]]

    run(main)


def test_other_readers_are_left_alone() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        received: asyncio.Queue[bytes] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with ours, theirs:
            loop.add_reader(ours, lambda: received.put_nowait(ours.recv(1)))
            theirs.send(b"abc")
            assert [await received.get() for _ in range(3)] == [b"a", b"b", b"c"]
            loop.remove_reader(ours)

    run(main)


class WatchedLoop(uvloop.Loop):
    """Notes which readers are added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Callable[..., Any]] = []

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self.readers.append(callback)
        super().add_reader(fd, callback, *args)


def test_the_installed_grpc_is_known() -> None:
    """Otherwise all goes on as without, only slower: this tells of it."""
    loop = WatchedLoop()

    async def main() -> None:
        server = grpc.aio.server()
        await server.start()
        await server.stop(None)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert [is_grpcs_reader(reader) for reader in loop.readers] == [True]
