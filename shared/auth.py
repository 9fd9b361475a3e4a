"""Calls without a known bearer token are refused before their message is read."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from shared.errors import UnauthenticatedError
from shared.identity import identify_client

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# Probes have no secrets.
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that bring `authorization: Bearer <a known token>`.

    The token's name becomes the client's identity.
    """

    def __init__(
        self,
        client_of: Callable[[str], str | None],
        on_refusal: Callable[[], None],
    ) -> None:
        self._client_of = client_of
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        if handler_call_details.method.startswith(_OPEN_SERVICE):
            return await continuation(handler_call_details)
        client = self._client(handler_call_details.invocation_metadata or ())
        if client is not None:
            identify_client(client, by_token=True)
            return await continuation(handler_call_details)
        self._on_refusal()
        # Of this kind, whatever the method's is: its message is not read.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _client(self, metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str):
                if value[: len(_SCHEME)].lower() == _SCHEME:
                    return self._client_of(value[len(_SCHEME) :])
        return None


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a call brings to such a server; empty without a token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


async def _refuse(_: Any, __: "grpc.aio.ServicerContext[Any, Any]") -> NoReturn:
    raise UnauthenticatedError("authorization: a valid bearer token is required")
