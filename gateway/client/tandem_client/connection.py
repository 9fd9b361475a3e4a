"""Where a client connects to, and with which secrets."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

import grpc

from shared.grpc_options import MAX_MESSAGE_BYTES, GrpcOptions, channel_options

# A lost gateway is tried again this soon; gRPC's own limit is two minutes.
_MAX_RECONNECT_BACKOFF_MS = 1000

# The PEM itself, or the path of its file.
Pem: TypeAlias = bytes | str | Path


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of an encrypted connection."""

    # Of the authorities that may vouch for the server. None: the system's, as gRPC finds them.
    roots: Pem | None = None
    # The client's own, for servers that ask for one; both or neither.
    certificate: Pem | None = None
    key: Pem | None = field(default=None, repr=False)
    # The name in the server's certificate, where it is not that of the address.
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls: certificate and key go together")


@dataclass(frozen=True, slots=True)
class Connection:
    """What a channel is made from, and what every call on it carries."""

    address: str
    options: GrpcOptions
    # None: plaintext.
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...] = field(repr=False)


def connection(
    address: str,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    allow_plaintext_token: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Connection:
    """Checks what can be checked without connecting.

    Raises ValueError, as for a token that would travel unencrypted to another machine, and
    OSError for a file that cannot be read.
    """
    if token and tls is None and not allow_plaintext_token and not is_loopback(address):
        raise ValueError(
            f"token: it would be readable on the way to {address}; "
            "use tls, or set allow_plaintext_token where the network is trusted"
        )
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError("token: only printable ASCII characters are allowed")
    options = channel_options(
        max_message_bytes=max_message_bytes, max_reconnect_backoff_ms=_MAX_RECONNECT_BACKOFF_MS
    )
    if is_loopback(address):
        # Whatever the environment says of proxies, none stands between a machine and itself.
        options.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return Connection(
        address,
        options,
        credentials=_credentials(tls) if tls is not None else None,
        metadata=(("authorization", f"Bearer {token}"),) if token else (),
    )


def is_loopback(address: str) -> bool:
    """Whether a gRPC target stays on this machine; false where that is not plain to see."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        # The part between two slashes names a DNS server.
        address = rest.rpartition("/")[2] if rest.startswith("//") else rest
    return all(_is_loopback_host(_host(part)) for part in address.split(","))


def _host(endpoint: str) -> str:
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    host, _, port = endpoint.rpartition(":")
    return host if host and ":" not in host and port.isdigit() else endpoint


def _is_loopback_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(tls.roots),
        private_key=_pem(tls.key),
        certificate_chain=_pem(tls.certificate),
    )


def _pem(source: Pem | None) -> bytes | None:
    return source if source is None or isinstance(source, bytes) else Path(source).read_bytes()
