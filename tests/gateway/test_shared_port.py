"""A port that our processes share, and strangers cannot join."""

import socket

import pytest

from gateway.shared_port import ListenError, reserved_port

HOST = "127.0.0.1"


def listener(address: str, *, shares: bool) -> socket.socket:
    """A server of the same user, with the flags that gRPC's have."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        sock.bind((host, int(port)))
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock


def test_port_0_becomes_a_number_that_several_may_listen_on() -> None:
    with reserved_port(f"{HOST}:0") as address:
        assert not address.endswith(":0")
        with listener(address, shares=True), listener(address, shares=True):
            pass


def test_the_reservation_takes_no_connection() -> None:
    with reserved_port(f"{HOST}:0") as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        with listener(address, shares=True) as server:
            for _ in range(8):
                with socket.create_connection((HOST, port), timeout=5):
                    server.settimeout(5)
                    server.accept()[0].close()


def test_a_second_reservation_is_refused_although_the_first_one_shares() -> None:
    with (
        reserved_port(f"{HOST}:0") as address,
        pytest.raises(ListenError, match="already in use"),
        reserved_port(address),
    ):
        pass


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_on_which_somebody_listens_is_refused(shares: bool) -> None:
    with listener(f"{HOST}:0", shares=shares) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"{address}.*in use"), reserved_port(address):
            pass


def test_a_server_that_does_not_share_is_refused_while_the_port_is_reserved() -> None:
    with reserved_port(f"{HOST}:0") as address, pytest.raises(OSError, match="in use"):
        listener(address, shares=False)


def test_the_port_is_free_afterwards() -> None:
    with reserved_port(f"{HOST}:0") as address:
        pass
    with reserved_port(address) as again:
        assert again == address


def test_connections_that_a_former_server_closed_do_not_hold_the_port() -> None:
    with listener(f"{HOST}:0", shares=False) as former:
        address = f"{HOST}:{former.getsockname()[1]}"
        with socket.create_connection(former.getsockname()) as client:
            # Who closes first keeps the port in TIME_WAIT.
            former.accept()[0].close()
            assert client.recv(1) == b""
    with reserved_port(address) as again:
        assert again == address


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "localhost"])
def test_wildcards_and_names_are_reserved(host: str) -> None:
    with reserved_port(f"{host}:0") as address:
        assert address.startswith(f"{host}:")
        with pytest.raises(OSError, match="in use"):
            listener(f"{HOST}:{address.rpartition(':')[2]}", shares=False)


@pytest.mark.parametrize("address", ["unix:/tmp/x", "50051", "::1:50051", "host:http"])
def test_what_cannot_be_shared_is_named(address: str) -> None:
    with pytest.raises(ListenError, match="HOST:PORT"), reserved_port(address):
        pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ListenError, match="no such address"), reserved_port("192.0.2.1:0"):
        pass
