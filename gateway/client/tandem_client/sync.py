"""The client for programs without an event loop."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.grpc_options import MAX_MESSAGE_BYTES
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_client.answers import Gathered
from tandem_client.connection import Tls, connection
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


class Stream(Iterator[Event]):
    """The events of one request, which is under way when this exists.

    Closing it, or dropping it, cancels the request. One thread reads; any may close.
    """

    def __init__(self, generation: Generation, start: Callable[[Generation], Any]) -> None:
        self._generation = generation
        self._start = start
        self._closed = threading.Event()
        self._call = start(generation)

    @property
    def request_id(self) -> str:
        """For `abort`, and to find the request in the servers' logs."""
        return self._generation.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._closed.is_set():
            try:
                event = self._generation.take(next(self._call))
            except grpc.RpcError as failed:
                self._try_again(failed)
            except StopIteration:
                self.close()
            else:
                if event is not None:
                    return event
        raise StopIteration

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _try_again(self, failed: grpc.RpcError) -> None:
        """Raises the error where that is no use."""
        if self._closed.is_set():
            return
        error = error_of(failed)
        wait_s = self._generation.wait_s(error)
        if wait_s is None:
            self.close()
            raise error from None
        if not self._closed.wait(wait_s):
            try:
                self._call = self._start(self._generation)
            except ValueError:
                # What gRPC raises for a channel that was closed while this waited.
                self.close()
                raise CallCancelledError("the client was closed") from None
            # Whoever closed it meanwhile may have cancelled the call before this one.
            if self._closed.is_set():
                self._call.cancel()


class Client:
    """Calls a gateway. Threads may share one; close it, or use it in a `with` block.

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
        self._closed = threading.Event()
        self._channel = (
            grpc.insecure_channel(address, options=target.options)
            if target.credentials is None
            else grpc.secure_channel(address, target.credentials, options=target.options)
        )
        self._stub: Any = pb_grpc.InferenceServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call that is under way with CallCancelledError."""
        self._closed.set()
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Starts a request of `n` completions; for each comes a Started, Deltas, a Finished.

        Sent again after a failure that may pass, until there was text.
        """
        self._require_open()
        generation = Generation(prompt, n, options, self._settings.attempts(timeout_s))
        return Stream(generation, self._start)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Runs a prompt to its end."""
        return self.generate_many(prompt, 1, timeout_s=timeout_s, **options)[0]

    def generate_many(
        self,
        prompt: Prompt,
        n: int,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Runs a prompt to its end `n` times, which share the work on the prompt."""
        gathered = Gathered()
        with self.stream(prompt, n=n, timeout_s=timeout_s, **options) as events:
            for event in events:
                gathered.add(event)
        return gathered.completions(n)

    def tokenize(
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
        return self._ask(query, timeout_s)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """The text of some token ids."""
        query = detokenize_query(token_ids, skip_special_tokens=skip_special_tokens, model=model)
        return self._ask(query, timeout_s)

    def abort(self, *request_ids: str, timeout_s: float | None = None) -> dict[str, bool]:
        """Ends live requests, whose streams end with reason ABORTED.

        By id, whether it was live.
        """
        return self._ask(abort_query(request_ids), timeout_s)

    def model(self, *, timeout_s: float | None = None) -> Model:
        """What is served."""
        return self._ask(model_query(), timeout_s)

    def load(self, *, timeout_s: float | None = None) -> Load:
        """What the gateway and its workers are doing now."""
        return self._ask(load_query(), timeout_s)

    def flush_cache(self, *, timeout_s: float | None = None) -> int:
        """Drops every cached prefix that no running request holds; how many pages that freed."""
        return self._ask(flush_cache_query(), timeout_s)

    def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the gateway answers, and has a worker that is ready. Not tried again."""
        self._require_open()
        try:
            answer = self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as failed:
            error = error_of(failed)
            if is_out_of_reach(error):
                return False
            raise error from None
        return is_serving(answer)

    def _require_open(self) -> None:
        """Raises RuntimeError; gRPC's own error for it is a ValueError."""
        if self._closed.is_set():
            raise RuntimeError("this client is closed")

    def _start(self, generation: Generation) -> Any:
        return self._stub.GenerateStream(
            generation.request, timeout=generation.remaining_s(), metadata=self._metadata
        )

    def _ask(self, query: Query[_T], timeout_s: float | None) -> _T:
        self._require_open()
        attempts = self._settings.attempts(timeout_s)
        call = getattr(self._stub, query.method)
        while True:
            try:
                return query.answer(
                    call(query.request, timeout=attempts.remaining_s(), metadata=self._metadata)
                )
            except grpc.RpcError as failed:
                error = error_of(failed)
            wait_s = attempts.wait_s(error)
            if wait_s is None:
                raise error
            if self._closed.wait(wait_s):
                raise CallCancelledError("the client was closed")
