"""A client of the gateway under test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from gateway.server import RunningGateway
from shared.grpc_options import channel_options
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc


@dataclass
class Collected:
    """A whole stream."""

    started: pb.Started
    deltas: list[pb.Delta]
    finished: pb.Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        shown = [token_id for delta in self.deltas for token_id in delta.token_ids]
        return shown + list(self.finished.trailing_token_ids)


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


async def collect(stream: AsyncIterator[pb.GenerateStreamResponse]) -> Collected:
    """Reads a stream to its end, holding it to the order Started, Delta…, Finished."""
    events = [event async for event in stream]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"], kinds
    deltas = [event.delta for event in events[1:-1]]
    assert all(delta.text for delta in deltas), "an empty delta"
    return Collected(events[0].started, deltas, events[-1].finished)


def text(prompt: str, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, **fields)


def violated_fields(error: grpc.aio.AioRpcError) -> list[str]:
    """The fields in an error's BadRequest details."""
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    assert status is not None, "the status has no details"
    assert any(detail.Unpack(bad) for detail in status.details), "no BadRequest"
    return [violation.field for violation in bad.field_violations]


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    """The delay in an error's RetryInfo details."""
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    assert status is not None, "the status has no details"
    assert any(detail.Unpack(retry) for detail in status.details), "no RetryInfo"
    return float(retry.retry_delay.ToTimedelta().total_seconds())
