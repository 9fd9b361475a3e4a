"""Token files: what a line may be, whose a token is, and files that change."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from shared.errors import SettingsError
from shared.tasks import TaskSet
from shared.tokens import MAX_TOKENS, TokenStore, hash_line, read_token, read_tokens


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def store_of(path: Path, content: str) -> TokenStore:
    path.write_text(content)
    return TokenStore((), path)


def test_a_line_is_a_token_or_its_hash_with_or_without_a_name(tmp_path: Path) -> None:
    store = store_of(
        tmp_path / "tokens",
        f"""
        # who may call
        plain-token
        sha256:{digest_of("hashed")}
        alice:sha256:{digest_of("hers").upper()}   # on her laptop
        bob:his~token==

        """,
    )
    assert store.client_of("hers") == "alice"
    assert store.client_of("his~token==") == "bob"
    assert store.client_of("plain-token") == f"sha256-{digest_of('plain-token')[:8]}"
    assert store.client_of("hashed") == f"sha256-{digest_of('hashed')[:8]}"
    for unknown in ("", "hers ", "Hers", "alice:hers", digest_of("hashed"), "sha256", "ünknown"):
        assert store.client_of(unknown) is None, unknown


def test_what_tandem_token_prints_is_a_line(tmp_path: Path) -> None:
    lines = [hash_line("", "first"), hash_line("team/a@b.c", "second")]
    store = store_of(tmp_path / "tokens", "\n".join(lines))
    assert store.client_of("first")
    assert store.client_of("second") == "team/a@b.c"


@pytest.mark.parametrize("name", ["a b", "a:b", "x" * 65, "ä", "sha256", "a#b"])
def test_a_name_that_could_not_be_read_back_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="a name is"):
        hash_line(name, "token")


def test_a_client_may_have_two_tokens_while_it_changes_over(tmp_path: Path) -> None:
    store = store_of(tmp_path / "tokens", "alice:former\nalice:next\n")
    assert store.client_of("former") == store.client_of("next") == "alice"


@pytest.mark.parametrize(
    "line",
    [
        "two words",
        "sha256:abc",
        "sha256:" + "g" * 64,
        "a:b:c",
        "a:sha256:" + "0" * 63,
        "two:names:sha256:" + "0" * 64,
        ":secret",
        "secret:",
        "sécret",
        "\x00secret",
    ],
)
def test_a_line_that_is_neither_is_named_by_its_number_and_not_shown(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(SettingsError) as caught:
        store_of(path, f"good-one\n\n{line}\n")
    assert f"{path}, line 3: " in str(caught.value)
    assert line not in str(caught.value)


def test_one_token_with_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="alice and bob have the same token"):
        store_of(tmp_path / "tokens", f"alice:secret\nbob:sha256:{digest_of('secret')}\n")


def test_a_file_without_a_token_a_large_one_and_none_at_all_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(SettingsError, match="holds no token"):
        store_of(path, "# nobody yet\n")
    with pytest.raises(SettingsError, match=f"at most {MAX_TOKENS} tokens"):
        store_of(path, "\n".join(f"token-{i}" for i in range(MAX_TOKENS + 1)))
    with pytest.raises(SettingsError, match="larger than"):
        store_of(path, "x" * (1 << 20) + "y")
    path.unlink()
    with pytest.raises(SettingsError, match=f"cannot read {path}: No such file"):
        TokenStore((), path)


def test_tokens_of_the_setting_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("from-file\n")
    store = TokenStore(["a b:c", "sha256:short"], path)
    assert all(store.client_of(token) for token in ("a b:c", "sha256:short", "from-file"))
    assert TokenStore(["one"], None).is_required and TokenStore((), path).is_required
    assert not TokenStore((), None).is_required


def test_a_clients_file_holds_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret~1\n")
    assert read_token(path) == "secret~1"
    for content in ("", "two\nlines", "a b", "name:secret"):
        path.write_text(content)
        with pytest.raises(SettingsError, match="one token and nothing else"):
            read_token(path)


def test_a_hash_is_what_the_file_holds_and_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(hash_line("alice", "secret"))
    [known] = read_tokens(path)
    assert known.client == "alice"
    assert known.digest.hex() == digest_of("secret")


@asynccontextmanager
async def followed(store: TokenStore, period_s: float) -> AsyncIterator[None]:
    async with TaskSet() as tasks:
        tasks.start(store.follow(period_s), name="tokens")
        yield


async def until_known(store: TokenStore, token: str) -> None:
    async with asyncio.timeout(10):
        while store.client_of(token) is None:  # noqa: ASYNC110 - a store tells nobody
            await asyncio.sleep(0.005)


async def test_a_changed_file_is_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    store = store_of(path, "first")
    async with followed(store, period_s=0.01):
        path.write_text("second")
        await until_known(store, "second")
        assert store.client_of("first") is None
        other = tmp_path / "other"
        other.write_text("thirds")
        other.rename(path)
        await until_known(store, "thirds")


async def test_a_file_is_read_at_once_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    store = store_of(path, "first")
    async with followed(store, period_s=3600):
        path.write_text("second")
        store.look_again()
        await until_known(store, "second")
        assert store.client_of("second") == f"sha256-{digest_of('second')[:8]}"
        assert store.client_of("first") is None


async def test_a_broken_file_leaves_the_former_tokens_and_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    store = store_of(path, "first")
    with structlog.testing.capture_logs() as logs:
        async with followed(store, period_s=0.01):
            path.write_text("not a token: secret")
            async with asyncio.timeout(10):
                while not logs:  # noqa: ASYNC110 - a log tells nobody
                    await asyncio.sleep(0.005)
            assert store.client_of("first")
            path.write_text("second")
            await until_known(store, "second")
    assert [log["log_level"] for log in logs] == ["error", "info"]
    assert str(path) in logs[0]["reason"]
    assert "secret" not in repr(logs)
