"""One of several processes, as its parent sees it: what it says, and what signals do to it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from gateway.shared_port import reserved_port
from gateway.supervisor import ABLE, ALIVE, LISTEN
from shared.auth import bearer_metadata
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.answers import collect
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker

TIMEOUT_S = 20.0


class Slot:
    """A process, and its parent's end of the line."""

    def __init__(
        self, process: asyncio.subprocess.Process, line: socket.socket, address: str
    ) -> None:
        self.process = process
        self.address = address
        self._line = line

    async def until_says(self, word: bytes) -> None:
        loop = asyncio.get_running_loop()
        while word not in (heard := await loop.sock_recv(self._line, 64)):
            assert heard, "the process has ended"

    async def until_logs(self, event: str) -> None:
        assert self.process.stderr is not None
        while event.encode() not in (line := await self.process.stderr.readline()):
            assert line, "the process has ended"

    def may_listen(self) -> None:
        self._line.sendall(LISTEN)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Slot]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs, reserved_port("127.0.0.1:0") as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.process", str(os.getpid()), "0", address),
            *arguments,
            stdin=theirs.fileno(),
            stderr=asyncio.subprocess.PIPE,
        )
        theirs.close()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield Slot(process, ours, address)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_hang_up_ends_it_neither_before_its_turn_nor_while_it_drains(
    make_worker: MakeWorker, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:hers\n")
    async with (
        make_worker(echoes=False) as worker,
        started("--workers", worker.address, "--tokens-file", str(tokens)) as slot,
        grpc.aio.insecure_channel(slot.address) as channel,
    ):
        await slot.until_says(ABLE)
        slot.signal(signal.SIGHUP)
        slot.may_listen()
        await slot.until_logs('"serving"')
        metadata = bearer_metadata("hers")
        call = pb_grpc.InferenceServiceStub(channel).GenerateStream(text("x"), metadata=metadata)
        request = await worker.request()
        request.start()
        slot.signal(signal.SIGTERM)
        await slot.until_logs('"draining"')
        slot.signal(signal.SIGHUP)
        await slot.until_logs('"tokens read"')
        request.send_tokens([100])
        request.finish()
        assert (await collect(call)).finished.usage.completion_tokens == 1
        assert await slot.process.wait() == 0


async def test_one_that_is_told_to_stop_before_its_turn_waits_for_no_turn(
    make_worker: MakeWorker,
) -> None:
    async with make_worker() as worker, started("--workers", worker.address) as slot:
        await slot.until_says(ABLE)
        slot.signal(signal.SIGTERM)
        assert await slot.process.wait() == 0


async def test_one_that_waits_for_a_worker_stops_at_once() -> None:
    now = asyncio.get_running_loop().time
    async with started("--workers", "127.0.0.1:1") as slot:
        # It has an ear for signals by now, and no worker yet.
        await slot.until_says(ALIVE)
        began = now()
        slot.signal(signal.SIGTERM)
        assert await slot.process.wait() == 0
        assert now() - began < 2


async def test_it_shows_that_it_lives_for_as_long_as_it_does(make_worker: MakeWorker) -> None:
    async with make_worker() as worker, started("--workers", worker.address) as slot:
        await slot.until_says(ABLE)
        slot.may_listen()
        await slot.until_logs('"serving"')
        await slot.until_says(ALIVE)
        slot.signal(signal.SIGTERM)
        assert await slot.process.wait() == 0
