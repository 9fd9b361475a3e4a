"""The one place where errors become gRPC statuses, and statuses errors again.

Servicers raise ServingError and nothing else; whatever else escapes them is a fault of
ours, is logged with its traceback and reaches the client as INTERNAL without a word of
what is inside.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import Code, InvalidArgumentError, ServingError, error_of

# Both copies of the text (grpc-message, percent-encoded to three times its size, and the
# details) must fit in the 8 KiB of trailing metadata that clients accept.
MAX_MESSAGE_BYTES = 1024

_log = structlog.get_logger(__name__)

# gRPC's handlers are generic over messages that this module never looks at.
# Quoted, because they are generic for the type checker only.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Behavior: TypeAlias = "Callable[[Any, _Context], Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends every RPC that raises with the status of its error.

    Handlers are coroutine functions or async generators. Messages pass untouched: a
    handler that writes through its context costs nothing more for each of them.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        method = handler_call_details.method
        try:
            handler = await continuation(handler_call_details)
        except Exception as error:
            # Of an interceptor further in. gRPC would answer UNKNOWN with its words.
            handler = _failing(error)
        return None if handler is None else _guarded(handler, method)


def server_interceptors() -> list[grpc.aio.ServerInterceptor]:
    """What every server of ours is built with, outermost first."""
    return [ErrorInterceptor()]


def status_of(error: ServingError) -> grpc.Status:
    """The gRPC status of an error, with its google.rpc details."""
    message = _clip(error.message)
    status = status_pb2.Status(code=int(error.code), message=message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms > 0:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return cast(grpc.Status, rpc_status.to_status(status))


def error_from_rpc(error: grpc.aio.AioRpcError) -> ServingError:
    """The error that a failed call of ours stands for; codes we never send are INTERNAL."""
    number = error.code().value[0]
    code = Code(number) if number in set(Code) else Code.INTERNAL
    field, retry_after_ms = _details_of(error)
    return error_of(code, error.details() or "", field=field, retry_after_ms=retry_after_ms)


def _details_of(error: grpc.aio.AioRpcError) -> tuple[str, int]:
    field, retry_after_ms = "", 0
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(cast(bytes, value)).details:
            if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                request = error_details_pb2.BadRequest.FromString(detail.value)
                field = request.field_violations[0].field if request.field_violations else ""
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo.FromString(detail.value)
                retry_after_ms = retry.retry_delay.ToMilliseconds()
    return field, retry_after_ms


def _failing(error: Exception) -> _Handler:
    async def fail(_: Any, __: _Context) -> NoReturn:
        raise error

    # Of this kind, whatever the method's is: its message is not read.
    return grpc.stream_stream_rpc_method_handler(fail)


def _guarded(handler: _Handler, method: str) -> _Handler:
    """The same handler, with its errors turned into statuses."""
    behavior = _behavior_of(handler)
    # A unary request is decoded inside the guard: gRPC itself would answer UNKNOWN with
    # the decoder's words.
    decode = _decoder(handler.request_deserializer)
    if handler.request_streaming:
        run = _streaming(behavior) if handler.response_streaming else behavior
        deserializer = decode
    else:
        run = _decoding(_streaming(behavior) if handler.response_streaming else behavior, decode)
        deserializer = None

    async def guarded(request: Any, context: _Context) -> Any:
        try:
            return await run(request, context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            if _cancelled_from_outside():
                raise
            # Some inner task was cancelled. Left alone, this would end the handler without
            # a status and leave the client waiting for ever.
            status = _status_for(error, method)
        except Exception as error:
            status = _status_for(error, method)
            error.__traceback__ = None
        # The message, of up to 32 MiB, must not wait for the garbage collector, which would let
        # dozens of them gather. The error may be in a cycle with the frames that it came
        # through, by a future that it was in; and gRPC keeps what `abort` raises in one with
        # this frame and with any error that is being handled.
        del request
        await context.abort_with_status(status)
        raise AssertionError("abort_with_status always raises")

    return _maker(handler)(guarded, deserializer, handler.response_serializer)


def _behavior_of(handler: _Handler) -> _Behavior:
    behavior = cast(
        _Behavior,
        handler.unary_unary
        or handler.unary_stream
        or handler.stream_unary
        or handler.stream_stream,
    )
    # A plain generator would run on a thread, where cancelling it hangs the call.
    assert inspect.isasyncgenfunction(behavior) or inspect.iscoroutinefunction(behavior)
    return behavior


def _maker(handler: _Handler) -> "Callable[..., _Handler]":
    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler
        return grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler
    return grpc.unary_unary_rpc_method_handler


def _streaming(behavior: _Behavior) -> _Behavior:
    """A response stream as a coroutine that writes, whichever way it was written."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def drain(request: Any, context: _Context) -> None:
        async with aclosing(behavior(request, context)) as responses:
            async for response in cast(AsyncIterator[Any], responses):
                await context.write(response)

    return drain


def _decoding(behavior: _Behavior, decode: Callable[[bytes], Any]) -> _Behavior:
    async def decoding(raw: bytes, context: _Context) -> Any:
        return await behavior(decode(raw), context)

    return decoding


def _decoder(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def decode(raw: bytes) -> Any:
        if deserializer is None:
            return raw
        try:
            return deserializer(raw)
        except DecodeError:
            raise InvalidArgumentError(
                "request", f"{len(raw)} bytes that are no message of this call's type"
            ) from None

    return decode


def _cancelled_from_outside() -> bool:
    """Whether the RPC itself was cancelled, rather than something it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _status_for(error: BaseException, method: str) -> grpc.Status:
    if not isinstance(error, ServingError):
        # All that the client learns, and what finds the rest in the log.
        error_id = uuid.uuid4().hex
        _log.error("rpc failed unexpectedly", method=method, error_id=error_id, exc_info=error)
        error = ServingError(f"internal error {error_id}; the server's log has the details")
    return status_of(error)


def _clip(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return message
    return encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
