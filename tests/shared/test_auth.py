"""Bearer tokens at a server: who gets in, under what name, and who does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.auth import BearerTokenInterceptor, bearer_metadata
from shared.health import Readiness
from shared.identity import client_identity
from shared.interceptors import server_interceptors

CLIENTS = {"hers": "alice", "his": "bob"}


class Server:
    """Counts whom it has let in and whom it has not."""

    def __init__(self) -> None:
        self.num_refusals = 0
        self.seen: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    def refuse(self) -> None:
        self.num_refusals += 1

    async def call(self, request: bytes, context: Any) -> bytes:
        before = client_identity()
        self.seen.append(before)
        await self.go_on.wait()
        await asyncio.to_thread(lambda: self.seen.append(client_identity()))
        assert structlog.contextvars.get_contextvars()["client"] == before
        return before.encode()


@asynccontextmanager
async def served(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    gate = BearerTokenInterceptor(CLIENTS.get, server.refuse)
    grpc_server = grpc.aio.server(interceptors=[*server_interceptors(), gate])
    handlers: Any = {"Call": grpc.unary_unary_rpc_method_handler(server.call)}
    generic = grpc.method_handlers_generic_handler("test.Service", handlers)
    grpc_server.add_generic_rpc_handlers((generic,))
    await Readiness().attach(grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await grpc_server.stop(None)


async def call(channel: grpc.aio.Channel, metadata: Any, kind: str = "unary_unary") -> Any:
    method: Any = getattr(channel, kind)("/test.Service/Call")
    return await method(b"x", metadata=metadata, timeout=5)


async def test_a_known_token_is_let_in_under_its_name() -> None:
    server = Server()
    async with served(server) as channel:
        assert await call(channel, bearer_metadata("hers")) == b"alice"
        assert await call(channel, (("authorization", "bEaReR his"),)) == b"bob"
    assert server.seen == ["alice", "alice", "bob", "bob"]
    assert server.num_refusals == 0


async def test_calls_at_the_same_time_keep_their_names_apart() -> None:
    server = Server()
    server.go_on.clear()
    async with served(server) as channel, asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(call(channel, bearer_metadata(token))) for token in [*CLIENTS] * 8
        ]
        async with asyncio.timeout(5):
            while len(server.seen) < len(calls):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.005)
        server.go_on.set()
    assert [task.result() for task in calls] == [b"alice", b"bob"] * 8
    assert client_identity() == ""


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer theirs"),),
        (("authorization", "Basic hers"),),
        (("authorization", "hers"),),
        (("authorization", "Bearer hers "),),
        (("authorization-bin", b"Bearer hers"),),
        (("x-authorization", "Bearer hers"),),
    ],
)
async def test_any_other_call_is_refused_whether_its_method_is_there_or_not(metadata: Any) -> None:
    server = Server()
    async with served(server) as channel:
        for method in ("Call", "Other"):
            unary: Any = channel.unary_unary(f"/test.Service/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unary(b"x", metadata=metadata, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "theirs" not in (caught.value.details() or "")
    assert server.seen == []
    assert server.num_refusals == 2


async def test_health_is_told_to_anybody() -> None:
    async with served(Server()) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
