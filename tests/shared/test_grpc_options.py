"""The options do what they are for, on real servers."""

import grpc
import pytest

from shared.grpc_options import (
    CLIENT_KEEPALIVE_MS,
    MIN_RECV_PING_INTERVAL_MS,
    channel_options,
    server_options,
)


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
