"""Bearer tokens, known by their SHA-256 alone, and the file that they are read from.

One token a line, as `tandem token` prints it: `name:sha256:<hex>`, `sha256:<hex>`, or the
token itself, with or without a name before it. Blank lines and `#` comments are skipped.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from shared.errors import SettingsError
from shared.reloading import Reloading, read_file

# Every one of them is compared with for each call: about 0.3 µs each.
MAX_TOKENS = 4096

_HASH = "sha256"
_NAME = re.compile(r"[A-Za-z0-9._@/-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# RFC 6750's b64token: nothing that HTTP would have to quote, and no colon.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MAX_FILE_BYTES = 1 << 20
# How soon a changed file is noticed by itself.
_PERIOD_S = 2.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KnownToken:
    """A token without the token: enough to know it again."""

    client: str
    digest: bytes


class TokenSet:
    """Tells whose a token is."""

    def __init__(self, tokens: Iterable[KnownToken]) -> None:
        """Raises SettingsError when one token has two names, or there are too many."""
        self._tokens = tuple(tokens)
        if len(self._tokens) > MAX_TOKENS:
            raise SettingsError(f"at most {MAX_TOKENS} tokens, got {len(self._tokens)}")
        clients: dict[bytes, str] = {}
        for token in self._tokens:
            first = clients.setdefault(token.digest, token.client)
            if first != token.client:
                raise SettingsError(f"{first} and {token.client} have the same token")

    def __len__(self) -> int:
        return len(self._tokens)

    def client_of(self, token: str) -> str | None:
        """The client's name; None for a token that is not known."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        # Compares with all of them, each in constant time, so that time tells nothing.
        for known in self._tokens:
            if hmac.compare_digest(digest, known.digest):
                found = known.client
        return found


class TokenStore:
    """The tokens of two settings: a list, and a file that may change at any time."""

    def __init__(self, plain: Sequence[str], file: Path | None) -> None:
        """Raises SettingsError when the file cannot be used."""
        self._listed = tuple(map(_known, plain))
        self._file = file
        self._asked = asyncio.Event()
        files = [] if file is None else [file]
        self._tokens = Reloading(files, self._read, self._complain)

    @property
    def is_required(self) -> bool:
        """Whether calls must bring a token at all."""
        return bool(self._listed) or self._file is not None

    def client_of(self, token: str) -> str | None:
        return self._tokens.value.client_of(token)

    def look_again(self) -> None:
        """Reads the file soon, changed or not. On the loop's thread."""
        self._asked.set()

    async def follow(self, period_s: float = _PERIOD_S) -> None:
        """Keeps up with the file until it is cancelled. A broken one leaves the old tokens."""
        while self._file is not None:
            is_asked = await self._asked_within(period_s)
            # Off the loop: the file may be on a slow disk.
            if await asyncio.to_thread(self._tokens.refresh, always=is_asked):
                _log.info("tokens read", file=str(self._file), count=len(self._tokens.value))

    async def _asked_within(self, period_s: float) -> bool:
        try:
            async with asyncio.timeout(period_s):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    def _read(self) -> TokenSet:
        if self._file is None:
            return TokenSet(self._listed)
        return TokenSet([*self._listed, *read_tokens(self._file)])

    def _complain(self, error: SettingsError) -> None:
        _log.error("tokens not read; the former ones stay", reason=str(error))


def read_tokens(path: Path) -> list[KnownToken]:
    """What a file of tokens holds. Raises SettingsError naming the line, never its content.

    A file without a token is an error: it is more likely half written than meant.
    """
    text = read_file(path, _MAX_FILE_BYTES).decode(errors="replace")
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        token = _parse(content)
        if token is None:
            raise SettingsError(
                f"{path}, line {number}: neither [name:]{_HASH}:<64 hex digits> nor [name:]<token>"
            )
        tokens.append(token)
    if not tokens:
        raise SettingsError(f"{path} holds no token")
    return tokens


def read_token(path: Path) -> str:
    """The one token, in the clear, of a client's file. Raises SettingsError."""
    token = read_file(path, _MAX_FILE_BYTES).decode(errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise SettingsError(f"{path} is to hold one token and nothing else")
    return token


def hash_line(name: str, token: str) -> str:
    """The line of a token file that stands for a token. Raises SettingsError for a bad name."""
    if name and not (_NAME.fullmatch(name) and name != _HASH):
        raise SettingsError(f"a name is 1 to 64 of A-Z a-z 0-9 . _ @ / -, and not {_HASH}")
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f"{name}:{_HASH}:{digest}" if name else f"{_HASH}:{digest}"


def _known(token: str, client: str = "") -> KnownToken:
    return _named(hashlib.sha256(token.encode()).digest(), client)


def _named(digest: bytes, client: str) -> KnownToken:
    # Part of the hash, so that even a client without a name is the same in every process.
    return KnownToken(client or f"{_HASH}-{digest.hex()[:8]}", digest)


def _parse(line: str) -> KnownToken | None:
    *front, last = line.split(":")
    is_hash = bool(front) and front[-1] == _HASH
    names = front[:-1] if is_hash else front
    if len(names) > 1 or not all(_NAME.fullmatch(name) for name in names):
        return None
    client = names[0] if names else ""
    if is_hash:
        return _named(bytes.fromhex(last), client) if _DIGEST.fullmatch(last) else None
    return _known(last, client) if _TOKEN.fullmatch(last) else None
