"""Errors become statuses with details, on all four kinds of RPC, and nothing hangs."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest
import structlog

from shared.errors import (
    Code,
    InvalidArgumentError,
    QueueFullError,
    ServingError,
    UnavailableError,
)
from shared.interceptors import error_from_rpc, server_interceptors
from shared.pb.tandem.worker.v1 import worker_pb2

SERVICE = "test.Service"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@asynccontextmanager
async def served(
    handler: Any, more: Sequence[grpc.aio.ServerInterceptor] = ()
) -> AsyncIterator[grpc.aio.Channel]:
    """A server with one method, `/test.Service/Call`, behind our interceptors and some more."""
    server = grpc.aio.server(interceptors=[*server_interceptors(), *more])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Call": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def one(request: bytes) -> AsyncIterator[bytes]:
    yield request


async def untyped_call(channel: grpc.aio.Channel, method: str) -> Any:
    call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
    return await call(b"", timeout=5)


async def outcome_of(kind: str, channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    """The error that a call of the given kind ends with."""
    call = getattr(channel, kind)(f"/{SERVICE}/Call")
    request = one(b"x") if kind.startswith("stream") else b"x"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(5):
            if kind.endswith("stream"):
                async for _ in call(request):
                    pass
            else:
                await call(request)
    return caught.value


def coroutine_handler(kind: str, act: Callable[[], Awaitable[None]]) -> Any:
    async def behavior(request: Any, context: Context) -> bytes | None:
        if kind.endswith("stream"):
            await context.write(b"first")
        await act()
        return None if kind.endswith("stream") else b"done"

    return getattr(grpc, f"{kind}_rpc_method_handler")(behavior)


def generator_handler(kind: str, act: Callable[[], Awaitable[None]]) -> Any:
    async def behavior(request: Any, context: Context) -> AsyncIterator[bytes]:
        yield b"first"
        await act()

    return getattr(grpc, f"{kind}_rpc_method_handler")(behavior)


HANDLERS = [
    ("unary_unary", coroutine_handler),
    ("unary_stream", coroutine_handler),
    ("unary_stream", generator_handler),
    ("stream_unary", coroutine_handler),
    ("stream_stream", coroutine_handler),
    ("stream_stream", generator_handler),
]


@pytest.mark.parametrize(("kind", "make"), HANDLERS)
async def test_a_serving_error_arrives_with_its_code_field_and_retry_time(
    kind: str, make: Callable[..., Any]
) -> None:
    async def full() -> None:
        raise QueueFullError("16 requests wait already", field="queue", retry_after_ms=1500)

    async with served(make(kind, full)) as channel:
        error = error_from_rpc(await outcome_of(kind, channel))
    assert isinstance(error, QueueFullError)
    assert error.message == "16 requests wait already"
    assert (error.code, error.field, error.retry_after_ms) == (
        Code.RESOURCE_EXHAUSTED,
        "queue",
        1500,
    )


@pytest.mark.parametrize(("kind", "make"), HANDLERS)
async def test_an_unexpected_error_is_internal_and_tells_the_client_nothing(
    kind: str, make: Callable[..., Any]
) -> None:
    async def fault() -> None:
        raise KeyError("/secret/path")

    async with served(make(kind, fault)) as channel:
        status = await outcome_of(kind, channel)
    assert status.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (status.details() or "")
    assert "KeyError" not in (status.details() or "")


@pytest.mark.parametrize(("kind", "make"), HANDLERS)
async def test_a_cancelled_inner_task_does_not_leave_the_client_waiting(
    kind: str, make: Callable[..., Any]
) -> None:
    async def inner_cancel() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with served(make(kind, inner_cancel)) as channel:
        status = await outcome_of(kind, channel)
    assert status.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(("kind", "make"), HANDLERS)
async def test_a_client_cancel_reaches_the_handler_as_cancellation(
    kind: str, make: Callable[..., Any]
) -> None:
    running, ended = asyncio.Event(), asyncio.Event()
    causes: list[type[BaseException]] = []

    async def wait() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            causes.append(type(error))
            ended.set()
            raise

    async with served(make(kind, wait)) as channel:
        call = getattr(channel, kind)(f"/{SERVICE}/Call")
        rpc = call(one(b"x") if kind.startswith("stream") else b"x")
        async with asyncio.timeout(5):
            await running.wait()
            rpc.cancel()
            await ended.wait()
    assert causes == [asyncio.CancelledError]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_message_that_does_not_parse_is_an_invalid_argument(kind: str) -> None:
    async def behavior(request: Any, context: Context) -> bytes | None:
        if kind.startswith("stream"):
            async for _ in request:
                pass
        return None if kind.endswith("stream") else b"done"

    handler = getattr(grpc, f"{kind}_rpc_method_handler")(
        behavior, request_deserializer=worker_pb2.Submit.FromString
    )
    async with served(handler) as channel:
        status = await outcome_of(kind, channel)
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT


class Message:
    """A request that can be watched."""


async def raise_at_once(_: Message) -> None:
    raise InvalidArgumentError("text", "too long")


async def raise_from_a_future(_: Message) -> None:
    # As work on a thread does. The future has the error, whose frames have the future.
    future = asyncio.get_running_loop().create_future()
    future.set_exception(InvalidArgumentError("text", "too long"))
    await future


@pytest.mark.parametrize("act", [raise_at_once, raise_from_a_future])
async def test_the_message_of_a_call_that_failed_is_gone_with_the_call(
    act: Callable[[Message], Awaitable[None]],
) -> None:
    messages: list[weakref.ref[Message]] = []

    def message(_: bytes) -> Message:
        made = Message()
        messages.append(weakref.ref(made))
        return made

    async def behavior(request: Message, context: Context) -> None:
        await act(request)

    handler: Any = grpc.unary_unary_rpc_method_handler(behavior, request_deserializer=message)
    async with served(handler) as channel:
        gc.disable()
        try:
            for _ in range(3):
                error = await outcome_of("unary_unary", channel)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            async with asyncio.timeout(5):
                while any(one() for one in messages):  # noqa: ASYNC110 - memory tells nobody
                    await asyncio.sleep(0.005)
        finally:
            gc.enable()
    assert len(messages) == 3


async def test_a_handler_may_still_abort_by_itself() -> None:
    async def behavior(request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    async with served(grpc.unary_unary_rpc_method_handler(behavior)) as channel:
        status = await outcome_of("unary_unary", channel)
    assert (status.code(), status.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")


@pytest.mark.parametrize("text", ["x" * 100_000, "é" * 50_000, "世" * 30_000])
async def test_a_very_long_message_is_cut_rather_than_lost(text: str) -> None:
    async def behavior(request: bytes, context: Context) -> bytes:
        raise InvalidArgumentError("chat.messages", text)

    async with served(grpc.unary_unary_rpc_method_handler(behavior)) as channel:
        status = await outcome_of("unary_unary", channel)
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(status).field == "chat.messages"
    assert (status.details() or "").endswith("…")


async def test_an_unknown_method_is_unimplemented() -> None:
    async def behavior(request: bytes, context: Context) -> bytes:
        return b""

    async with served(grpc.unary_unary_rpc_method_handler(behavior)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await untyped_call(channel, "Other")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_unreachable_server_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await untyped_call(channel, "Call")
    assert isinstance(error_from_rpc(caught.value), UnavailableError)


def test_a_code_that_we_never_send_reads_as_internal() -> None:
    unknown = grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, details="gone")
    error = error_from_rpc(unknown)
    assert type(error) is ServingError
    assert (error.code, error.message) == (Code.INTERNAL, "gone")


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_fault_of_an_interceptor_tells_the_client_nothing_either(kind: str) -> None:
    class Broken(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            raise RuntimeError("/secret/path")

    async def behavior(request: Any, context: Context) -> bytes:
        return b""

    handler = getattr(grpc, f"{kind}_rpc_method_handler")(behavior)
    async with served(handler, [Broken()]) as channel:
        status = await outcome_of(kind, channel)
    assert status.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (status.details() or "")


async def test_an_internal_error_has_an_id_that_the_log_has_too() -> None:
    async def behavior(request: bytes, context: Context) -> bytes:
        raise RuntimeError("what the log alone is told")

    with structlog.testing.capture_logs() as logs:
        async with served(grpc.unary_unary_rpc_method_handler(behavior)) as channel:
            first = await outcome_of("unary_unary", channel)
            second = await outcome_of("unary_unary", channel)
    ids = [log["error_id"] for log in logs]
    assert ids[0] in (first.details() or "") and ids[1] in (second.details() or "")
    assert ids[0] != ids[1]
