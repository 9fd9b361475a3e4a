"""A client of the gateway under test."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.server import RunningGateway
from shared.grpc_options import channel_options
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.answers import Collected, collect, collect_all


class GatewayUnderTest:
    """The running gateway and a channel to it."""

    def __init__(self, running: RunningGateway) -> None:
        self.running = running
        self.address = f"127.0.0.1:{running.port}"
        self.channel = grpc.aio.insecure_channel(
            self.address, options=channel_options(max_message_bytes=64 << 20, own_connection=True)
        )
        self.stub: Any = pb_grpc.InferenceServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def until_ready(self, num_workers: int) -> None:
        """Returns when that many workers are ready and health says so."""
        await self.until(lambda: self.running.router.num_ready == num_workers)
        await self.until_serving(num_workers > 0)

    async def until_serving(self, serving: bool) -> None:
        """Watches the health service."""
        wanted = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        async with asyncio.timeout(10):
            watch = self.health.Watch(health_pb2.HealthCheckRequest())
            async for answer in watch:
                if answer.status == wanted:
                    break
            watch.cancel()

    async def until_idle(self) -> None:
        await self.until(lambda: len(self.running.live_requests) == 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - the gateway tells nobody of its inside
                await asyncio.sleep(0.005)

    def stream(self, request: pb.GenerateRequest, *, timeout_s: float | None = 30) -> Any:
        return self.stub.GenerateStream(request, timeout=timeout_s)

    async def collect(self, request: pb.GenerateRequest) -> Collected:
        return await collect(self.stream(request))


def text(prompt: str, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, **fields)


async def error_of(call: Any, *, saying: str = "") -> grpc.aio.AioRpcError:
    """What a stream ends with, which must be an error that says so."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect_all(call)
    assert saying in (caught.value.details() or "")
    return caught.value
