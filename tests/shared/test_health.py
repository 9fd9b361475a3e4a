"""Readiness as health clients see it."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.grpc_options import channel_options, server_options
from shared.health import Readiness

NAME = "tandem.test.Service"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def readiness() -> Readiness:
    return Readiness(NAME)


@pytest.fixture
async def stub(readiness: Readiness) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    server = grpc.aio.server(options=server_options())
    await readiness.attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


async def status(stub: health_pb2_grpc.HealthStub, service: str = "") -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


@pytest.mark.parametrize("service", ["", NAME])
async def test_a_server_begins_not_serving_and_says_when_it_serves(
    service: str, readiness: Readiness, stub: health_pb2_grpc.HealthStub
) -> None:
    assert await status(stub, service) == NOT_SERVING
    await readiness.set_serving()
    assert readiness.is_serving
    assert await status(stub, service) == SERVING
    await readiness.set_not_serving()
    assert not readiness.is_serving
    assert await status(stub, service) == NOT_SERVING


async def test_a_watch_is_told_of_every_change(
    readiness: Readiness, stub: health_pb2_grpc.HealthStub
) -> None:
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
    async with asyncio.timeout(5):
        assert (await watch.read()).status == NOT_SERVING
        for _ in range(3):
            await readiness.set_serving()
            assert (await watch.read()).status == SERVING
            await readiness.set_not_serving()
            assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_after_shut_down_nothing_makes_it_serve_again(
    readiness: Readiness, stub: health_pb2_grpc.HealthStub
) -> None:
    await readiness.set_serving()
    await readiness.shut_down()
    await readiness.set_serving()
    assert not readiness.is_serving
    assert await status(stub) == NOT_SERVING


async def test_an_unknown_service_is_not_found(stub: health_pb2_grpc.HealthStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(stub, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
