"""A worker and a gateway as real processes on loopback, and what tests ask of them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc

from gateway.cli.health import probe
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.tls import ClientTls
from tests.answers import Collected, collect
from tests.ports import free_port

# Quoted, because it is generic for the type checker only.
Stream: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateStreamResponse]"

START_TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 64 << 20


@dataclass
class Service:
    """One child process that serves gRPC on `address`; its output goes to `log`."""

    module: str
    args: Sequence[str]
    address: str
    log: Path
    # How to ask for its health; None: in the clear.
    tls: ClientTls | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "--listen", self.address, *self.args],
                stdout=log,
                stderr=log,
                env={**os.environ, "NO_COLOR": "1"},
            )

    def wait_serving(self, *, serving: bool = True, timeout_s: float = START_TIMEOUT_S) -> None:
        """Blocks until the health service answers (NOT_)SERVING. Raises AssertionError."""
        until = time.monotonic() + timeout_s
        while self.is_serving() is not serving:
            assert time.monotonic() < until, f"{self.module} health:\n{self.tail()}"
            if serving:
                assert self.process.poll() is None, f"{self.module} exited:\n{self.tail()}"
            time.sleep(0.05)

    def is_serving(self) -> bool:
        return probe(self.address, timeout_s=2, tls=self.tls) == "SERVING"

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.module} ignored SIGTERM:\n{self.tail()}") from None


@dataclass
class Pair:
    """A gateway with its workers."""

    gateway: Service
    workers: list[Service]

    @property
    def address(self) -> str:
        return self.gateway.address

    def wait_linked(self, token: str = "", timeout_s: float = START_TIMEOUT_S) -> None:
        """Blocks until the gateway, which serves with its first worker, has them all."""
        until = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.address) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {token}"),)
            while not all(
                worker.ready
                for worker in stub.GetLoad(pb.GetLoadRequest(), metadata=metadata).workers
            ):
                assert time.monotonic() < until, f"a worker is not linked:\n{self.gateway.tail()}"
                time.sleep(0.05)


@contextmanager
def running_pair(
    folder: Path,
    worker_args: Sequence[str],
    gateway_args: Sequence[str] = (),
    *,
    num_workers: int = 1,
    token: str = "",
) -> Iterator[Pair]:
    """Starts the processes, waits until they serve, and stops them at the end.

    `token` is one that the gateway takes, where it asks for one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workers = [
        Service(
            "worker",
            worker_args,
            f"127.0.0.1:{free_port()}",
            folder / f"worker{index}.log",
        )
        for index in range(num_workers)
    ]
    gateway = Service(
        "gateway",
        # As many on a large machine as on a small one; what a test says comes later and wins.
        ["--workers", ",".join(w.address for w in workers), "--processes", "1", *gateway_args],
        f"127.0.0.1:{free_port()}",
        folder / "gateway.log",
    )
    services = [*workers, gateway]
    for service in services:
        service.start()
    try:
        for service in services:
            service.wait_serving()
        pair = Pair(gateway, workers)
        pair.wait_linked(token)
        yield pair
    finally:
        for service in reversed(services):
            service.stop()


class Client:
    """The public API over one channel, and the page check that ends every test."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self.stub = pb_grpc.InferenceServiceStub(self.channel)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    def stream(self, request: pb.GenerateRequest, *, timeout_s: float = 60) -> "Stream":
        call: Stream = self.stub.GenerateStream(request, timeout=timeout_s)
        return call

    async def collect(self, request: pb.GenerateRequest, *, timeout_s: float = 60) -> Collected:
        """Streams a request to its end."""
        return await collect(self.stream(request, timeout_s=timeout_s))

    async def tokenize(self, text: str) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=False)
        return list((await self.stub.Tokenize(request)).token_ids)

    async def load(self) -> pb.GetLoadResponse:
        load: pb.GetLoadResponse = await self.stub.GetLoad(pb.GetLoadRequest())
        return load

    async def assert_clean(self, *, timeout_s: float = 5) -> None:
        """Nothing runs, nothing waits, and every page is free or cached."""
        until = time.monotonic() + timeout_s
        while True:
            load = await self.load()
            if load.live_requests == 0 and all(is_clean(worker) for worker in load.workers):
                return
            assert time.monotonic() < until, f"something was left behind: {load}"
            await asyncio.sleep(0.02)


def is_clean(load: pb.WorkerLoad) -> bool:
    return (
        load.running == load.waiting == load.pages_held == 0
        and load.pages_free + load.pages_cached == load.pages_total
    )


async def rest_of(
    call: "Stream",
) -> AsyncIterator[pb.GenerateStreamResponse]:
    """What is left of a stream that was begun with `read`; gRPC lets no one mix that with
    `async for` on the call itself."""
    while isinstance(event := await call.read(), pb.GenerateStreamResponse):
        yield event
