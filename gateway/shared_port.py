"""A port that several processes of ours listen on, and nobody else.

With SO_REUSEPORT any process of the same user may join a port, so a second gateway started
on it by mistake would take half of the connections without a word. The reservation rules
that out: a socket that is bound, and never listens, so that no connection comes to it.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

_WILDCARDS = ("0.0.0.0", "::")


class ListenError(OSError):
    """The address cannot be shared by several processes, or cannot be had."""


@contextmanager
def reserved_port(address: str) -> Iterator[str]:
    """The address, with a port where it asked for 0; no one else gets it inside the block.

    Processes of ours listen on it with SO_REUSEPORT. Raises ListenError.
    """
    host, port = _parse(address)
    with ExitStack() as held:
        for family, name in _hosts(address, host):
            try:
                sock = _bind_alone(family, name, port)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    # A name may stand for an address that this machine does not have.
                    continue
                reason = os.strerror(error.errno or 0)
                raise ListenError(f"cannot listen on {address}: {reason}") from error
            held.enter_context(sock)
            port = sock.getsockname()[1]
            _let_ours_join(sock)
        if not port:
            raise ListenError(f"cannot listen on {address}: this machine has no such address")
        yield f"{address.rpartition(':')[0]}:{port}"


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_plain = host and "/" not in host and ":" not in host
    if not port.isdecimal() or not (is_plain or is_bracketed):
        raise ListenError(f"cannot listen on {address}: several processes need HOST:PORT")
    return host.strip("[]"), int(port)


def _hosts(address: str, host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What gRPC will bind: one socket for both families where the host is a wildcard."""
    if host in _WILDCARDS:
        is_dual = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, "::") if is_dual else (socket.AF_INET, "0.0.0.0")]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror}") from error
    return list({(family, str(where[0])): None for family, _, _, _, where in found})


def _bind_alone(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """Fails when anybody has the port, whether they would share it or not."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # What is left of a server's last connections must not keep its successor waiting.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _let_ours_join(sock: socket.socket) -> None:
    """The kernel compares the flags that sockets have now, not those they were bound with."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
