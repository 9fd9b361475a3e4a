"""TLS on both hops: PEM files by path, checked at the start, read again when they change.

Imports little, because the health probe of the container images runs every few seconds.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from shared.errors import SettingsError
from shared.grpc_options import GrpcOptions
from shared.reloading import Reloading, read_file

# In place of a file of authorities: those that gRPC ships.
PUBLIC_AUTHORITIES = "public"

_MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server proves itself with, and whom it lets connect."""

    cert: Path
    key: Path
    # Clients must bring a certificate that one of these authorities signed (mutual TLS).
    client_ca: Path | None = None

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.cert, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client trusts, and what it proves itself with where that is asked for."""

    # None: the authorities that gRPC ships.
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    # In the server's certificate, where that is another name than its address.
    server_name: str = ""

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.ca, self.cert, self.key) if path is not None]


def server_tls(cert: str, key: str, client_ca: str) -> ServerTls | None:
    """From three settings, of which the empty ones are not set; None: no TLS.

    Raises SettingsError for a combination that makes no sense.
    """
    if bool(cert) != bool(key):
        raise SettingsError("--tls-cert and --tls-key go together: set both or neither")
    if client_ca and not cert:
        raise SettingsError("--tls-client-ca needs --tls-cert and --tls-key")
    if not cert:
        return None
    return ServerTls(Path(cert), Path(key), Path(client_ca) if client_ca else None)


def client_tls(
    ca: str, cert: str, key: str, server_name: str, *, prefix: str = "--tls"
) -> ClientTls | None:
    """The same for a client, whose flags begin with `prefix`."""
    if bool(cert) != bool(key):
        raise SettingsError(f"{prefix}-cert and {prefix}-key go together: set both or neither")
    if not ca:
        if cert or server_name:
            raise SettingsError(
                f"TLS needs {prefix}-ca: the server's authorities as a PEM file, "
                f'or "{PUBLIC_AUTHORITIES}"'
            )
        return None
    return ClientTls(
        ca=None if ca == PUBLIC_AUTHORITIES else Path(ca),
        cert=Path(cert) if cert else None,
        key=Path(key) if key else None,
        server_name=server_name,
    )


def server_credentials(
    tls: ServerTls, on_problem: Callable[[SettingsError], None]
) -> grpc.ServerCredentials:
    """Credentials that follow their files: every new connection gets what is in them then.

    Raises SettingsError when they cannot be used now. `on_problem` is told, on a thread of
    gRPC's, of a change to files that cannot; the former ones then stay in use.
    """
    files = Reloading(tls.files, lambda: _server_configuration(tls), on_problem)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        return files.value if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        files.value,
        # None is documented, and missing in the types alone.
        changed,  # type: ignore[arg-type]
        require_client_authentication=tls.client_ca is not None,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """From the files as they are now. Raises SettingsError."""
    chain, key = None, None
    if tls.cert is not None and tls.key is not None:
        chain, key = _read_chain(tls.cert, tls.key)
    authorities = None if tls.ca is None else _read_authorities(tls.ca)
    return grpc.ssl_channel_credentials(authorities, key, chain)


def tls_options(tls: ClientTls) -> GrpcOptions:
    """What a secure channel needs besides the options of any channel."""
    if not tls.server_name:
        return []
    return [("grpc.ssl_target_name_override", tls.server_name)]


def open_channel(address: str, tls: ClientTls | None, options: GrpcOptions) -> grpc.aio.Channel:
    """A channel, in the clear without `tls`. Raises SettingsError."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = channel_credentials(tls)
    return grpc.aio.secure_channel(address, credentials, options=[*options, *tls_options(tls)])


def _server_configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    chain, key = _read_chain(tls.cert, tls.key)
    authorities = None if tls.client_ca is None else _read_authorities(tls.client_ca)
    return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


def _read_chain(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Certificates and key that fit. gRPC would find fault with them at each handshake only."""
    chain_pem = _read_pem(cert, b"CERTIFICATE-----", "certificate")
    key_pem = _read_pem(key, b"PRIVATE KEY-----", "private key")
    if b"ENCRYPTED" in key_pem:
        raise SettingsError(f"{key} is encrypted; a key without a passphrase is needed")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{key} is not the key of the certificate in {cert}") from error
        raise SettingsError(f"{cert} with {key}: {_words(error)}") from error
    except OSError as error:
        raise SettingsError(f"cannot read {cert} or {key}: {error.strerror}") from error
    return chain_pem, key_pem


def _read_authorities(path: Path) -> bytes:
    pem = _read_pem(path, b"CERTIFICATE-----", "certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=pem.decode("ascii", errors="replace")
        )
    except ssl.SSLError as error:
        raise SettingsError(f"{path}: {_words(error)}") from error
    return pem


def _read_pem(path: Path, mark: bytes, what: str) -> bytes:
    content = read_file(path, _MAX_PEM_BYTES)
    if mark not in content:
        raise SettingsError(f"{path} holds no PEM {what}")
    return content


def _words(error: ssl.SSLError) -> str:
    """OpenSSL's reason without the place in its sources."""
    return (error.reason or "cannot be used").lower().replace("_", " ")
