"""Opens the way to a worker: in the clear or over TLS, with the token that it asks for."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc
import structlog

from shared.auth import bearer_metadata
from shared.errors import SettingsError
from shared.grpc_options import GrpcOptions
from shared.reloading import Reloading
from shared.tls import ClientTls, channel_credentials, tls_options
from shared.tokens import read_token

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Secrets:
    """What the files held when they were read."""

    # None: no TLS.
    credentials: grpc.ChannelCredentials | None
    # Empty: none.
    token: str


@dataclass(frozen=True, slots=True)
class Dialled:
    """A way to one worker. gRPC connects, and connects again, by itself."""

    channel: grpc.aio.Channel
    # Whether the files have changed since; their certificates go with new channels alone.
    is_stale: Callable[[], bool]


class WorkerDialer:
    """Makes channels to workers; certificates, keys and the token may change meanwhile."""

    def __init__(
        self, options: GrpcOptions, *, tls: ClientTls | None = None, token_file: Path | None = None
    ) -> None:
        """Raises SettingsError when a file cannot be used."""
        self._options = options
        self._tls = tls
        self._token_file = token_file
        files = [*(tls.files if tls else ()), *([token_file] if token_file else ())]
        self._secrets = Reloading(files, self._read, _complain)

    @asynccontextmanager
    async def dial(self, address: str, server_name: str = "") -> AsyncIterator[Dialled]:
        """The channel is closed with the block.

        `server_name` is in the server's certificate, unless the settings name another.
        """
        secrets = self._now()
        async with self._channel(address, secrets, server_name) as channel:
            if self._token_file is not None:
                channel = cast(grpc.aio.Channel, _WithMetadata(channel, self._metadata))
            yield Dialled(channel, lambda: self._now() is not secrets)

    def _channel(self, address: str, secrets: _Secrets, server_name: str) -> grpc.aio.Channel:
        if self._tls is None or secrets.credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        tls = replace(self._tls, server_name=self._tls.server_name or server_name)
        options = [*self._options, *tls_options(tls)]
        return grpc.aio.secure_channel(address, secrets.credentials, options=options)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return bearer_metadata(self._now().token)

    def _now(self) -> _Secrets:
        # On the loop, because it asks for the dates of a few small files, and seldom.
        self._secrets.refresh()
        return self._secrets.value

    def _read(self) -> _Secrets:
        return _Secrets(
            credentials=None if self._tls is None else channel_credentials(self._tls),
            token="" if self._token_file is None else read_token(self._token_file),
        )


class _WithMetadata:
    """A channel for a stub whose every call brings some metadata.

    Not a client interceptor: gRPC would carry each message of a stream through it.
    """

    def __init__(
        self, channel: grpc.aio.Channel, metadata: Callable[[], tuple[tuple[str, str], ...]]
    ) -> None:
        self._channel = channel
        self._metadata = metadata

    def __getattr__(self, kind: str) -> Callable[..., Callable[..., Any]]:
        make = getattr(self._channel, kind)

        def made(*arguments: Any, **options: Any) -> Callable[..., Any]:
            callable_ = make(*arguments, **options)
            return lambda *request, **call: callable_(*request, metadata=self._metadata(), **call)

        return made


def _complain(error: SettingsError) -> None:
    _log.error("worker credentials not read; the former ones stay", reason=str(error))
