"""One channel to a gateway, for the command line: the public API, failures in plain words."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from shared.auth import bearer_metadata
from shared.grpc_options import channel_options
from shared.interceptors import error_from_rpc
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.tls import ClientTls, open_channel

_ADVICE = {
    grpc.StatusCode.UNAVAILABLE: (
        "is a gateway ready at {address}? `tandem up` starts one; one with TLS needs --tls-ca"
    ),
    grpc.StatusCode.NOT_FOUND: "`tandem model` shows what is served",
    grpc.StatusCode.DEADLINE_EXCEEDED: "a longer --timeout gives it more time",
    grpc.StatusCode.UNIMPLEMENTED: "leave that option out, or update the server",
    grpc.StatusCode.UNAUTHENTICATED: "--token or TANDEM_TOKEN gives the gateway's bearer token",
    grpc.StatusCode.INTERNAL: "the server's log says more",
    grpc.StatusCode.UNKNOWN: "the server's log says more",
}
_TLS_ADVICE = (
    "is a gateway with TLS ready at {address}, does --tls-ca trust it, and does it ask for "
    "--tls-cert and --tls-key?"
)


class CallError(Exception):
    """A call that failed: the status, the server's words, and what to do about it."""

    def __init__(self, status: str, message: str, advice: str) -> None:
        super().__init__(f"{status}: {message}" + (f" ({advice})" if advice else ""))
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion."""

    request_id: str
    text: str
    finished: pb.Finished
    index: int = 0
    # One to one with the tokens, where they were asked for.
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Gathered:
    """What has come of one completion."""

    request_id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)

    def answer(self, finished: pb.Finished) -> Answer:
        logprobs = [*self.logprobs, *finished.trailing_logprobs]
        return Answer(self.request_id, "".join(self.texts), finished, finished.index, logprobs)


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway to call and how: a bearer token if it wants one, a time for each call."""

    address: str
    token: str = ""
    # None: as long as it takes.
    timeout_s: float | None = None
    # None: in the clear.
    tls: ClientTls | None = None


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """A worker to ask, past its gateway."""

    address: str
    token: str = ""
    tls: ClientTls | None = None


class Client:
    """Calls a gateway; every call ends by the timeout."""

    def __init__(self, target: Target) -> None:
        """Raises SettingsError when a file of the target's TLS cannot be used."""
        self._target = target
        self._metadata = bearer_metadata(target.token)
        # gRPC would wait up to two minutes before it tries a lost gateway again.
        options = channel_options(max_reconnect_backoff_ms=1000)
        self._channel = open_channel(target.address, target.tls, options)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)

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
        await self._channel.close()

    async def stream(
        self, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """The events of one request; leaving early cancels it. Raises CallError."""
        call = self._stub.GenerateStream(
            request, timeout=self._target.timeout_s, metadata=self._metadata
        )
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise self._call_error(error) from None
        finally:
            call.cancel()

    async def generate(self, request: pb.GenerateRequest, on_text: Callable[[str], None]) -> Answer:
        """Streams a request of one completion, telling its text as it comes.

        Raises CallError.
        """
        (answer,) = await self.generate_all(request, lambda _, text: on_text(text))
        return answer

    async def generate_all(
        self,
        request: pb.GenerateRequest,
        on_text: Callable[[int, str], None] = lambda index, text: None,
        on_end: Callable[[Answer], None] = lambda answer: None,
    ) -> list[Answer]:
        """Streams a request, telling the text and the end of each completion by its index.

        Raises CallError.
        """
        gathered: dict[int, _Gathered] = {}
        answers: dict[int, Answer] = {}
        async with aclosing(self.stream(request)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "started":
                        index = event.started.index
                        gathered[index] = _Gathered(event.started.request_id)
                    case "delta":
                        delta = event.delta
                        gathered[delta.index].texts.append(delta.text)
                        gathered[delta.index].logprobs.extend(delta.logprobs)
                        on_text(delta.index, delta.text)
                    case "finished":
                        index = event.finished.index
                        answers[index] = gathered[index].answer(event.finished)
                        on_end(answers[index])
        return [answers[index] for index in sorted(answers)]

    async def model(self) -> pb.GetModelResponse:
        """What is served. Raises CallError."""
        try:
            response: pb.GetModelResponse = await self._stub.GetModel(
                pb.GetModelRequest(), timeout=self._target.timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._call_error(error) from None
        return response

    def _call_error(self, error: grpc.aio.AioRpcError) -> CallError:
        is_lost_over_tls = self._target.tls and error.code() is grpc.StatusCode.UNAVAILABLE
        advice = _TLS_ADVICE if is_lost_over_tls else _ADVICE.get(error.code(), "")
        advice = advice.format(address=self._target.address)
        retry_after_ms = error_from_rpc(error).retry_after_ms
        if retry_after_ms:
            advice = f"try again in {retry_after_ms / 1000:g} s"
        return CallError(error.code().name, error.details() or "no details", advice)
