"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.grpc_options import MAX_MESSAGE_BYTES
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_client.answers import Gathered
from tandem_client.connection import Connection, Tls, connection
from tandem_client.errors import CallCancelledError, error_of
from tandem_client.events import Completion, Event
from tandem_client.generation import Generation
from tandem_client.options import ChatOptions, GenerateOptions, Message, Prompt
from tandem_client.queries import (
    HEALTH_TIMEOUT_S,
    Query,
    abort_query,
    detokenize_query,
    flush_cache_query,
    is_out_of_reach,
    is_serving,
    load_query,
    model_query,
    tokenize_query,
)
from tandem_client.retries import DEFAULT_RETRIES, RetryPolicy
from tandem_client.service_info import Load, Model
from tandem_client.settings import Settings

_T = TypeVar("_T")


class AsyncStream(AsyncIterator[Event]):
    """The events of one request, which is under way when this exists.

    Closing it, dropping it, or cancelling the task that reads it cancels the request.
    """

    # None if the call could not even begin.
    _call: Any = None

    def __init__(self, generation: Generation, start: Callable[[Generation], Any]) -> None:
        self._generation = generation
        self._start = start
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._call = start(generation)

    def __del__(self) -> None:
        # gRPC keeps a call alive until it has ended, whoever still wants it.
        if self._call is not None and not self._closed.is_set():
            # Garbage is collected on any thread, and perhaps after the loop.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._call.cancel)

    @property
    def request_id(self) -> str:
        """For `abort`, and to find the request in the servers' logs."""
        return self._generation.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._closed.is_set():
            try:
                response = await self._call.read()
            except grpc.RpcError as failed:
                await self._try_again(failed)
                continue
            except asyncio.CancelledError:
                # gRPC also raises it in whoever waits for a call that somebody else ended.
                if _is_cancelling():
                    raise
                if self._closed.is_set():
                    break
                raise CallCancelledError("the client was closed") from None
            if response is grpc.aio.EOF:
                self.close()
            elif (event := self._generation.take(response)) is not None:
                return event
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends a reader that waits in another task, too."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        """The same as `close`, for `contextlib.aclosing`."""
        self.close()

    async def _try_again(self, failed: grpc.RpcError) -> None:
        """Raises the error where that is no use."""
        if self._closed.is_set():
            return
        error = error_of(failed)
        wait_s = self._generation.wait_s(error)
        if wait_s is None:
            self.close()
            raise error from None
        try:
            async with asyncio.timeout(wait_s):
                await self._closed.wait()
        except TimeoutError:
            try:
                self._call = self._start(self._generation)
            except RuntimeError:
                # The client was closed while this waited.
                self.close()
                raise CallCancelledError("the client was closed") from None


class AsyncClient:
    """Calls a gateway. Tasks of one event loop may share one; close it, or use `async with`.

    `timeout_s` bounds each call with all its retries and may be given for a single call
    too; None, or `math.inf` for a single call, is as long as it takes. Calls raise
    TandemError; values that no message can hold are a TypeError or a ValueError.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float | None = None,
        retries: RetryPolicy = DEFAULT_RETRIES,
        allow_plaintext_token: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        target = connection(
            address,
            token=token,
            tls=tls,
            allow_plaintext_token=allow_plaintext_token,
            max_message_bytes=max_message_bytes,
        )
        self._settings = Settings(target, timeout_s, retries)
        self._metadata = target.metadata
        self._opened: _Channel | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call that is under way with CallCancelledError."""
        self._is_closed = True
        if self._opened is not None:
            await self._opened.channel.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Starts a request of `n` completions; for each comes a Started, Deltas, a Finished.

        Sent again after a failure that may pass, until there was text.
        """
        generation = Generation(prompt, n, options, self._settings.attempts(timeout_s))
        return AsyncStream(generation, self._start)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Runs a prompt to its end."""
        return (await self.generate_many(prompt, 1, timeout_s=timeout_s, **options))[0]

    async def generate_many(
        self,
        prompt: Prompt,
        n: int,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Runs a prompt to its end `n` times, which share the work on the prompt."""
        gathered = Gathered()
        async with self.stream(prompt, n=n, timeout_s=timeout_s, **options) as events:
            async for event in events:
                gathered.add(event)
        return gathered.completions(n)

    async def tokenize(
        self,
        prompt: str | Sequence[Message | Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """The token ids that `generate` would run; without special tokens if asked for."""
        query = tokenize_query(
            prompt, add_special_tokens=add_special_tokens, model=model, options=options
        )
        return await self._ask(query, timeout_s)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """The text of some token ids."""
        query = detokenize_query(token_ids, skip_special_tokens=skip_special_tokens, model=model)
        return await self._ask(query, timeout_s)

    async def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, bool]:
        """Ends live requests, whose streams end with reason ABORTED.

        By id, whether it was live.
        """
        return await self._ask(abort_query(request_ids), timeout_s)

    async def model(self, *, timeout_s: float | None = None) -> Model:
        """What is served."""
        return await self._ask(model_query(), timeout_s)

    async def load(self, *, timeout_s: float | None = None) -> Load:
        """What the gateway and its workers are doing now."""
        return await self._ask(load_query(), timeout_s)

    async def flush_cache(self, *, timeout_s: float | None = None) -> int:
        """Drops every cached prefix that no running request holds; how many pages that freed."""
        return await self._ask(flush_cache_query(), timeout_s)

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the gateway answers, and has a worker that is ready. Not tried again."""
        try:
            answer = await self._channel().health.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as failed:
            error = error_of(failed)
            if is_out_of_reach(error):
                return False
            raise error from None
        return is_serving(answer)

    def _start(self, generation: Generation) -> Any:
        return self._channel().stub.GenerateStream(
            generation.request, timeout=generation.remaining_s(), metadata=self._metadata
        )

    async def _ask(self, query: Query[_T], timeout_s: float | None) -> _T:
        attempts = self._settings.attempts(timeout_s)
        call = getattr(self._channel().stub, query.method)
        while True:
            try:
                return query.answer(
                    await call(
                        query.request, timeout=attempts.remaining_s(), metadata=self._metadata
                    )
                )
            except grpc.RpcError as failed:
                error = error_of(failed)
            wait_s = attempts.wait_s(error)
            if wait_s is None:
                raise error
            await asyncio.sleep(wait_s)
            if self._is_closed:
                raise CallCancelledError("the client was closed")

    def _channel(self) -> "_Channel":
        """Made at the first call: gRPC ties it to the loop that runs then."""
        if self._is_closed:
            raise RuntimeError("this client is closed")
        if self._opened is None:
            self._opened = _Channel(self._settings.connection)
        return self._opened


class _Channel:
    def __init__(self, target: Connection) -> None:
        self.channel = (
            grpc.aio.insecure_channel(target.address, options=target.options)
            if target.credentials is None
            else grpc.aio.secure_channel(target.address, target.credentials, options=target.options)
        )
        self.stub: Any = pb_grpc.InferenceServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)


def _is_cancelling() -> bool:
    """Whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
