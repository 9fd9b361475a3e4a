"""Who the caller is, for everything that happens on behalf of one call.

Set once by an interceptor. gRPC runs each call in a task of its own, so the name goes with
the call into whatever it awaits, and never into another one.
"""

from contextvars import ContextVar

import structlog

_client: ContextVar[str] = ContextVar("tandem_client", default="")
_has_token: ContextVar[bool] = ContextVar("tandem_client_has_token", default=False)


def client_identity() -> str:
    """The name of the client whose call this is; empty when it has none."""
    return _client.get()


def token_identity() -> str:
    """The same if a token says so: of those names there are no more than tokens."""
    return _client.get() if _has_token.get() else ""


def identify_client(name: str, *, by_token: bool) -> None:
    """Names the client of the current call, in its log lines too."""
    _client.set(name)
    _has_token.set(by_token)
    structlog.contextvars.bind_contextvars(client=name)
