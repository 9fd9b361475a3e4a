"""Who a client is when no tokens are asked for: what a proxy in front says it is."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from shared.identity import identify_client

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

MAX_IDENTITY_CHARS = 128


class MetadataIdentityInterceptor(grpc.aio.ServerInterceptor):
    """Takes the client's identity from a metadata key, unchecked.

    A client's address is no identity: many share one behind a proxy, and one has many.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        for key, value in handler_call_details.invocation_metadata or ():
            if key == self._key and isinstance(value, str):
                # One with a line break in it could write log lines of its own.
                if value.isprintable():
                    identify_client(value[:MAX_IDENTITY_CHARS], by_token=False)
                break
        return await continuation(handler_call_details)
