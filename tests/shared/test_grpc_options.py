"""The options do what they are for, on real servers."""

import asyncio
import struct
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.grpc_options import (
    CLIENT_KEEPALIVE_MS,
    MIN_RECV_PING_INTERVAL_MS,
    channel_options,
    server_options,
)
from shared.health import Readiness
from tests.faults.frames import PREFACE, SETTINGS

MAX_CONCURRENT_STREAMS = 3


async def test_a_second_server_on_the_same_port_fails_unless_the_port_is_shared() -> None:
    alone = grpc.aio.server(options=server_options())
    port = alone.add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError):
        grpc.aio.server(options=server_options()).add_insecure_port(f"127.0.0.1:{port}")
    first = grpc.aio.server(options=server_options(reuse_port=True))
    shared_port = first.add_insecure_port("127.0.0.1:0")
    second = grpc.aio.server(options=server_options(reuse_port=True))
    assert second.add_insecure_port(f"127.0.0.1:{shared_port}") == shared_port
    for server in (alone, first, second):
        await server.start()
        await server.stop(None)


@pytest.mark.parametrize("reuse_port", [False, True])
def test_connections_to_a_shared_port_alone_are_made_anew_now_and_then(reuse_port: bool) -> None:
    options = dict(server_options(reuse_port=reuse_port))
    assert ("grpc.max_connection_age_ms" in options) is reuse_port
    # Calls on the old connection go on: the time that they are given is not limited.
    assert "grpc.max_connection_age_grace_ms" not in options


def test_clients_ping_far_less_often_than_servers_allow() -> None:
    assert CLIENT_KEEPALIVE_MS >= 30_000
    assert CLIENT_KEEPALIVE_MS >= 2 * MIN_RECV_PING_INTERVAL_MS


@pytest.mark.parametrize("is_own", [False, True])
def test_a_channel_gets_its_own_connection_only_when_it_asks(is_own: bool) -> None:
    options = dict(channel_options(own_connection=is_own))
    assert ("grpc.use_local_subchannel_pool" in options) is is_own


def test_both_sides_have_the_same_message_cap_in_both_directions() -> None:
    for options in (server_options(max_message_bytes=123), channel_options(max_message_bytes=123)):
        assert dict(options)["grpc.max_receive_message_length"] == 123
        assert dict(options)["grpc.max_send_message_length"] == 123


async def test_a_burst_of_calls_is_answered_to_the_last() -> None:
    server = grpc.aio.server(options=server_options())
    await Readiness().attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(3500)]
        codes = {await call.code() for call in calls}
    await server.stop(None)
    assert codes == {grpc.StatusCode.OK}


async def test_a_connection_is_told_how_many_calls_it_may_have_at_once() -> None:
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + SETTINGS)
    async with asyncio.timeout(5):
        # RFC 9113, sections 4.1 and 6.5: a number and its value, again and again.
        length = int.from_bytes((await reader.readexactly(9))[:3], "big")
        told = dict(struct.iter_unpack(">HI", await reader.readexactly(length)))
    writer.close()
    await server.stop(None)
    assert told[MAX_CONCURRENT_STREAMS] == 4096


async def test_a_server_that_is_slow_to_say_hello_is_waited_for() -> None:
    server = grpc.aio.server()
    await Readiness().attach(server)
    upstream = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    connections: list[asyncio.Task[None]] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        # Longer than the pause between two attempts.
        await asyncio.sleep(0.5)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    proxy = await asyncio.start_server(late, "127.0.0.1", 0)
    address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    options = channel_options(max_reconnect_backoff_ms=100, own_connection=True)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(None)
    proxy.close()
    await proxy.wait_closed()
    # Python 3.11's wait_closed does not wait for the connections.
    await asyncio.gather(*connections)
