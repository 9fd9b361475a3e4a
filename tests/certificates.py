"""Certificates made for a test: an authority, and files of what it has signed."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from shared.tls import ClientTls, ServerTls


class Authority:
    """Signs certificates and writes them into a folder of the test's."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def become(self, other: "Authority") -> None:
        """Its file holds the other's certificate from now on."""
        self.ca.write_bytes(other.ca.read_bytes())

    def issue(self, *names: str, to: str = "server", is_expired: bool = False) -> tuple[Path, Path]:
        """Certificate and key in the files `to`.pem and `to`.key, which are overwritten."""
        now = datetime.now(UTC)
        leaf = self._ca.issue_cert(
            *names,
            not_before=now - timedelta(days=2),
            not_after=now - timedelta(days=1) if is_expired else now + timedelta(days=1),
        )
        cert, key = self._folder / f"{to}.pem", self._folder / f"{to}.key"
        cert.write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        return cert, key

    def server(self, *names: str, client_ca: Path | None = None) -> ServerTls:
        """For a server on loopback, unless other names are given."""
        cert, key = self.issue(*(names or ("127.0.0.1",)))
        return ServerTls(cert, key, client_ca)

    def client(self, name: str = "client") -> ClientTls:
        """For a client that trusts this authority and has a certificate of it."""
        cert, key = self.issue(f"{name}.test", to=name)
        return ClientTls(self.ca, cert, key)
