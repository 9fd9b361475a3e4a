"""Bearer tokens, where any are configured."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from shared.errors import UnauthenticatedError

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# Probes have no secrets.
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that bring `authorization: Bearer <one of the tokens>`."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = [token.encode() for token in tokens]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        if handler_call_details.method.startswith(_OPEN_SERVICE) or self._is_known(
            handler_call_details.invocation_metadata or ()
        ):
            return await continuation(handler_call_details)
        # The call is refused before its message is read, whatever its kind.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _is_known(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str):
                if value[: len(_SCHEME)].lower() == _SCHEME:
                    return self._matches(value[len(_SCHEME) :].encode())
        return False

    def _matches(self, given: bytes) -> bool:
        # Compares with all of them, in constant time, so that time tells nothing.
        return sum(hmac.compare_digest(given, token) for token in self._tokens) > 0


async def _refuse(_: Any, __: "grpc.aio.ServicerContext[Any, Any]") -> NoReturn:
    raise UnauthenticatedError("authorization: a valid bearer token is required")
