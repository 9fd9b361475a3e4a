"""Secrets go where they should: tokens, certificates, and what may be read on the way."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem_client import AsyncClient, Client, Tls, UnavailableError
from tandem_client.connection import connection, is_loopback
from tandem_client.retries import NO_RETRIES
from tests.client.conftest import MakeCaller
from tests.client.scripted_server import ScriptedServer

NAME = "gateway.example"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:50051",
        "127.8.8.8:1",
        "localhost:50051",
        "localhost",
        "[::1]:50051",
        "dns:///localhost:50051",
        "ipv4:127.0.0.1:1,127.0.0.1:2",
        "ipv6:[::1]:50051",
        "unix:/run/tandem.sock",
        "unix-abstract:tandem",
    ],
)
def test_an_address_of_this_machine_is_known(address: str) -> None:
    assert is_loopback(address)
    connection(address, token="s3cret")


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:50051",
        "gateway:50051",
        "localhost.example:50051",
        "127.0.0.1.example:50051",
        "[fe80::1]:50051",
        "dns:///gateway:50051",
        "dns://127.0.0.1/gateway:50051",
        "ipv4:127.0.0.1:1,10.0.0.1:2",
        "xds:///localhost",
        "",
    ],
)
def test_a_token_does_not_leave_this_machine_unencrypted(address: str) -> None:
    assert not is_loopback(address)
    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match="use tls, or set allow_plaintext_token"):
            client(address, token="s3cret")
    assert connection(address).metadata == ()
    carried = (("authorization", "Bearer s3cret"),)
    assert connection(address, token="s3cret", allow_plaintext_token=True).metadata == carried
    assert connection(address, token="s3cret", tls=Tls()).metadata == carried


def test_a_token_is_not_shown() -> None:
    made = connection("localhost:1", token="s3cret")
    tls = Tls(certificate=b"public", key=b"s3cret")
    assert "s3cret" not in repr(made) + repr(tls)
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        connection("localhost:1", token="s3cret\n")
    assert "s3cret" not in str(refused.value)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ValueError, match="go together"):
        Tls(certificate=b"")


def test_a_certificate_file_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Client("localhost:1", tls=Tls(roots=tmp_path / "none.pem"))


@dataclass(frozen=True)
class Certificates:
    """A server's and a client's, each its own authority."""

    server: Path
    client: Path

    @staticmethod
    def key(certificate: Path) -> Path:
        return certificate.with_suffix(".key")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    made = Certificates(folder / "server.pem", folder / "client.pem")
    for certificate in (made.server, made.client):
        subprocess.run(
            [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
            + ["-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
            + ["-addext", f"subjectAltName=DNS:{NAME}"]
            + ["-keyout", str(made.key(certificate)), "-out", str(certificate)],
            check=True,
            capture_output=True,
            timeout=30,
        )
    return made


@asynccontextmanager
async def encrypted(address: str, certificates: Certificates) -> AsyncIterator[str]:
    """Ends TLS in front of a plaintext server, as a proxy does; wants a client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.client))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates.server, certificates.key(certificates.server))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, inner_writer))
            tasks.create_task(copy(inner_reader, writer))

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while some := await reader.read(1 << 16):
            writer.write(some)
            await writer.drain()
    except ConnectionError:
        # Whoever went first; the other side is told by the close.
        return
    finally:
        writer.close()


async def test_an_encrypted_connection_carries_text_and_token(
    server: ScriptedServer, make_caller: MakeCaller, certificates: Certificates
) -> None:
    tls = Tls(
        roots=certificates.server,
        certificate=certificates.client.read_bytes(),
        key=str(certificates.key(certificates.client)),
        server_name=NAME,
    )
    async with encrypted(server.address, certificates) as address:
        async with make_caller(address, tls=tls, token="s3cret") as caller:
            assert (await caller.call("generate", "Hi")).text == "Hello"
    assert server.tokens == ["Bearer s3cret"]


async def test_a_server_that_nobody_vouches_for_is_not_spoken_to(
    server: ScriptedServer, make_caller: MakeCaller, certificates: Certificates
) -> None:
    own = {"certificate": certificates.client, "key": certificates.key(certificates.client)}
    stranger = Tls(roots=certificates.client, server_name=NAME, **own)
    other_name = Tls(roots=certificates.server, server_name="other.example", **own)
    no_certificate = Tls(roots=certificates.server, server_name=NAME)
    async with encrypted(server.address, certificates) as address:
        for tls in (stranger, other_name, no_certificate):
            async with make_caller(address, tls=tls, retries=NO_RETRIES) as caller:
                with pytest.raises(UnavailableError):
                    await caller.call("generate", "Hi", timeout_s=10)
    assert server.requests == []
