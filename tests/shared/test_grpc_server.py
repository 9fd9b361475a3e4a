"""A server outlives whatever a call may name as its method."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.auth import BearerTokenInterceptor
from shared.grpc_options import server_options
from shared.grpc_server import new_server
from shared.health import Readiness
from shared.interceptors import server_interceptors
from tests.faults.frames import PREFACE, SETTINGS, headers

PATHS = (b"/\xff\xfe", b"/grpc.health.v1.Health/\x80", b"\xc3", b"", b"/\x00", b"/" + b"x" * 100)


@asynccontextmanager
async def serving(*more: grpc.aio.ServerInterceptor) -> AsyncIterator[str]:
    """The address of a server with nothing but its health."""
    server = new_server([*server_interceptors(), *more], server_options())
    readiness = Readiness()
    await readiness.attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await readiness.set_serving()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def answer_to(address: str, path: bytes) -> bytes:
    """What comes back, as it is on the wire, up to the status."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        writer.write(PREFACE + SETTINGS + headers(path))
        heard = b""
        async with asyncio.timeout(5):
            while b"grpc-message" not in heard:
                assert (more := await reader.read(4096)), "the connection is closed"
                heard += more
        return heard
    finally:
        writer.close()


async def status_of(address: str, method: str) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=5)
        return caught.value.code()


async def is_serving(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_call_whose_path_is_no_text_ends_itself_alone() -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        for path in PATHS:
            # UNIMPLEMENTED.
            assert b"grpc-status\x0212" in await answer_to(address, path), path
            assert await is_serving(channel)
        assert not watch.done()


async def test_an_unknown_method_is_unimplemented_and_a_known_one_is_served() -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        for method in ("/grpc.health.v1.Health/None", "/None/Check", "/none"):
            assert await status_of(address, method) is grpc.StatusCode.UNIMPLEMENTED
        assert await is_serving(channel)


async def test_an_unknown_method_tells_nothing_without_a_token() -> None:
    gate = BearerTokenInterceptor(lambda _: None, lambda: None)
    async with serving(gate) as address:
        assert b"grpc-status\x0216" in await answer_to(address, b"/\xff")
        assert await status_of(address, "/none") is grpc.StatusCode.UNAUTHENTICATED
