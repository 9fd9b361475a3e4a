"""Certificates: who gets in, what is said of files that cannot be used, and new files."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from shared.errors import SettingsError
from shared.tls import (
    ClientTls,
    ServerTls,
    channel_credentials,
    client_tls,
    open_channel,
    server_credentials,
    server_tls,
)
from tests.certificates import Authority

# A channel of its own for each call: a shared connection would outlive its certificate.
OWN_CONNECTION: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def served(
    tls: ServerTls, on_problem: Callable[[SettingsError], None] = lambda _: None
) -> AsyncIterator[str]:
    """The address of a server with one method."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),)
    )
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tls, on_problem))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(address: str, tls: ClientTls | None) -> bytes:
    async with open_channel(address, tls, OWN_CONNECTION) as channel:
        method: Any = channel.unary_unary("/test.Service/Call")
        answer: bytes = await method(b"x", timeout=10)
        return answer


async def refusal(address: str, tls: ClientTls | None) -> str:
    """What is said of a connection that does not come about."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(address, tls)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def test_a_client_that_trusts_the_authority_gets_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with served(authority.server()) as address:
        assert await call(address, ClientTls(authority.ca)) == b"x"


async def test_a_name_that_is_not_the_address_can_be_given(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with served(authority.server("worker.internal")) as address:
        named = ClientTls(authority.ca, server_name="worker.internal")
        assert await call(address, named) == b"x"
        assert "Hostname" in await refusal(address, ClientTls(authority.ca))


async def test_a_client_in_the_clear_does_not_get_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with served(authority.server()) as address:
        await refusal(address, None)
        assert await call(address, ClientTls(authority.ca)) == b"x"


async def test_a_server_of_another_authority_is_not_believed(tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with served(Authority(tmp_path).server()) as address:
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(address, ClientTls(other.ca))


async def test_an_expired_certificate_is_not_believed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("127.0.0.1", is_expired=True)
    async with served(ServerTls(cert, key)) as address:
        assert "certificate has expired" in await refusal(address, ClientTls(authority.ca))


async def test_mutual_tls_lets_in_whom_the_authority_has_signed_and_nobody_else(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    stranger = Authority(tmp_path, "other").client("stranger")
    async with served(authority.server(client_ca=authority.ca)) as address:
        assert await call(address, authority.client()) == b"x"
        await refusal(address, ClientTls(authority.ca))
        await refusal(address, replace(stranger, ca=authority.ca))


async def test_an_expired_client_certificate_does_not_get_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    expired = ClientTls(authority.ca, *authority.issue("a.test", to="expired", is_expired=True))
    valid = ClientTls(authority.ca, *authority.issue("a.test", to="valid"))
    async with served(authority.server(client_ca=authority.ca)) as address:
        await refusal(address, expired)
        # Its dates alone are what keeps the other out.
        assert await call(address, valid) == b"x"


async def test_a_new_certificate_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with served(authority.server("one.test")) as address:
        one, two = (ClientTls(authority.ca, server_name=f"{name}.test") for name in ("one", "two"))
        assert await call(address, one) == b"x"
        authority.server("two.test")
        assert await call(address, two) == b"x"
        await refusal(address, one)


async def test_a_new_authority_of_clients_is_used_from_the_next_connection_on(
    tmp_path: Path,
) -> None:
    authority, former = Authority(tmp_path), Authority(tmp_path, "clients")
    one = replace(former.client("one"), ca=authority.ca)
    async with served(authority.server(client_ca=former.ca)) as address:
        assert await call(address, one) == b"x"
        two = replace(Authority(tmp_path, "clients").client("two"), ca=authority.ca)
        assert await call(address, two) == b"x"
        await refusal(address, one)


async def test_a_broken_new_certificate_leaves_the_former_in_use_and_is_told_once(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    tls = authority.server()
    problems: list[SettingsError] = []
    async with served(tls, problems.append) as address:
        tls.cert.write_text("half a certifi")
        for _ in range(2):
            assert await call(address, ClientTls(authority.ca)) == b"x"
        assert [str(problem) for problem in problems] == [f"{tls.cert} holds no PEM certificate"]
        tls.key.unlink()
        assert await call(address, ClientTls(authority.ca)) == b"x"
        authority.server()
        assert await call(address, ClientTls(authority.ca)) == b"x"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    tls = Authority(tmp_path).server()
    tls.cert.unlink()
    assert problem_with(tls) == f"cannot read {tls.cert}: No such file or directory"


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    tls = Authority(tmp_path).server()
    assert problem_with(ServerTls(tls.key, tls.key)) == f"{tls.key} holds no PEM certificate"
    assert problem_with(ServerTls(tls.cert, tls.cert)) == f"{tls.cert} holds no PEM private key"
    wrong = ServerTls(tls.cert, tls.key, client_ca=tls.key)
    assert problem_with(wrong) == f"{tls.key} holds no PEM certificate"


def test_a_damaged_certificate_is_named(tmp_path: Path) -> None:
    tls = Authority(tmp_path).server()
    for path in (tls.cert, tls.key):
        whole = path.read_text()
        path.write_text(damaged_pem(whole))
        assert str(path) in problem_with(tls)
        path.write_text(whole)
    damaged = tmp_path / "authorities.pem"
    damaged.write_text(damaged_pem(tls.cert.read_text()))
    assert str(damaged) in problem_with(ServerTls(tls.cert, tls.key, client_ca=damaged))


def damaged_pem(whole: str) -> str:
    return whole.replace("-----\n", "-----\n!!", 1)


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.server()
    _, other = authority.issue("127.0.0.1", to="other")
    assert problem_with(ServerTls(tls.cert, other)) == (
        f"{other} is not the key of the certificate in {tls.cert}"
    )


def test_an_encrypted_key_is_refused_without_asking_for_its_passphrase(tmp_path: Path) -> None:
    tls = Authority(tmp_path).server()
    words = ("BEGIN ENCRYPTED PRIVATE KEY", "END ENCRYPTED PRIVATE KEY")
    tls.key.write_text(f"-----{words[0]}-----\nMIIB\n-----{words[1]}-----\n")
    assert problem_with(tls) == f"{tls.key} is encrypted; a key without a passphrase is needed"


def problem_with(tls: ServerTls) -> str:
    with pytest.raises(SettingsError) as caught:
        server_credentials(tls, lambda _: None)
    return str(caught.value)


def test_clients_say_the_same_of_their_files(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(SettingsError, match=str(missing)):
        channel_credentials(ClientTls(missing))
    authority = Authority(tmp_path)
    with pytest.raises(SettingsError, match=str(missing)):
        channel_credentials(ClientTls(authority.ca, missing, missing))


@pytest.mark.parametrize("settings", [("cert", "", ""), ("", "key", ""), ("", "", "ca")])
def test_half_of_a_servers_settings_is_refused(settings: tuple[str, str, str]) -> None:
    with pytest.raises(SettingsError, match="--tls-cert"):
        server_tls(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ("ca", "cert", "", ""),
        ("ca", "", "key", ""),
        ("", "cert", "key", ""),
        ("", "", "", "name"),
    ],
)
def test_half_of_a_clients_settings_is_refused(settings: tuple[str, str, str, str]) -> None:
    with pytest.raises(SettingsError, match="--worker-tls-"):
        client_tls(*settings, prefix="--worker-tls")


def test_no_settings_are_no_tls_and_public_is_no_file() -> None:
    assert server_tls("", "", "") is None
    assert client_tls("", "", "", "") is None
    assert client_tls("public", "", "", "") == ClientTls(ca=None)
    channel_credentials(ClientTls(ca=None))
