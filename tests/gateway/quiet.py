"""A gateway whose workers only keep what they are sent: the test speaks for them."""

from dataclasses import dataclass
from typing import Any

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.fake_worker import FakeWorker, Received


@dataclass(frozen=True)
class Quiet:
    """One worker, and its gateway."""

    worker: FakeWorker
    gateway: GatewayUnderTest

    async def stream(
        self, request: pb.GenerateRequest | None = None, *, timeout_s: float | None = 30
    ) -> tuple[Any, Received]:
        """A call, and its request once it is at the worker."""
        index = len(self.worker.requests)
        call = self.gateway.stream(request or text("x"), timeout_s=timeout_s)
        return call, await self.worker.request(index)

    async def begun(self, request: pb.GenerateRequest | None = None) -> tuple[Any, Received]:
        """The same, and the worker has sent a token, which may not have been read yet."""
        call, received = await self.stream(request)
        received.start()
        received.send_tokens([100])
        return call, received

    async def abort_replies(self, *requests: Received) -> list[bool | None]:
        """Whether a reply was asked for, once the worker was told to abort each of them."""
        await self.worker.until(lambda: all(r.abort_reply is not None for r in requests))
        return [request.abort_reply for request in requests]


@dataclass(frozen=True)
class QuietTwo:
    """Two workers, and their gateway."""

    one: FakeWorker
    other: FakeWorker
    gateway: GatewayUnderTest

    @property
    def num_requests(self) -> list[int]:
        return [len(self.one.requests), len(self.other.requests)]

    async def stream(
        self, request: pb.GenerateRequest | None = None
    ) -> tuple[Any, FakeWorker, FakeWorker]:
        """A first call, the worker that has got its request, and the one that has not."""
        call = self.gateway.stream(request or text("x"))
        await self.gateway.until(lambda: bool(self.one.requests or self.other.requests))
        in_order = (self.one, self.other) if self.one.requests else (self.other, self.one)
        return call, *in_order

    async def finish_all(self, *calls: Any) -> None:
        """Ends what the workers have, and what the calls wait for with it."""
        for request in self.one.requests + self.other.requests:
            request.finish()
        for call in calls:
            async for _ in call:
                pass
