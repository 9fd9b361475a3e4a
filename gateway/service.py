"""The public service: protobuf in, protobuf out, and nothing decided here."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from gateway.completion import Delta, Event, Started
from gateway.convert import Answer, load_message, model_message, stream_response
from gateway.encoding import PromptEncoder
from gateway.generation import Arrival, Generator
from gateway.live_requests import LiveRequests
from gateway.model_checks import check_model
from gateway.observation import Observation, observed
from gateway.outlet import Outlet
from gateway.request import Prompt, TextPrompt
from gateway.request_span import RequestSpan
from gateway.router import Router, no_worker_error
from gateway.served_model import ServedModel
from gateway.stream_writer import deadline, stream_writer
from gateway.validation import (
    chat_prompt,
    checked_request_id,
    checked_token_ids,
    generation_request,
)
from shared.errors import InvalidArgumentError
from shared.limits import MAX_ABORTED_IDS
from shared.logs import request_logging
from shared.metrics import GenerationMetrics
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.tracing import Tracer, checked_traceparent
from shared.version import tandem_version

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What one call may take."""

    max_message_bytes: int
    # For calls that bring no deadline; 0: none.
    default_timeout_s: float
    slow_reader_limit_s: float


class InferenceService(pb_grpc.InferenceServiceServicer):
    """`tandem.v1.InferenceService`."""

    def __init__(
        self,
        generator: Generator,
        router: Router,
        encoder: PromptEncoder,
        live_requests: LiveRequests,
        metrics: GenerationMetrics,
        *,
        limits: ServiceLimits,
        tracer: Tracer | None = None,
    ) -> None:
        self._generator = generator
        self._router = router
        self._encoder = encoder
        self._live_requests = live_requests
        self._metrics = metrics
        self._limits = limits
        self._tracer = tracer

    # A coroutine that writes, not an async generator: gRPC would wrap each message.
    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        with self._observed("GenerateStream", context) as observation:

            def to_message(delta: Delta) -> pb.GenerateStreamResponse:
                observation.see(delta)
                return stream_response(delta)

            async with (
                stream_writer(context, self._limits.slow_reader_limit_s) as writer,
                self._events(request, context, observation, Outlet(writer, to_message)) as events,
            ):
                async for event in events:
                    observation.see(event)
                    message = (
                        await self._encoder.convert(partial(stream_response, event))
                        if _is_long(event)
                        else stream_response(event)
                    )
                    await writer.write(message)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        answer = Answer()
        with self._observed("Generate", context) as observation:
            async with self._events(request, context, observation) as events:
                async for event in events:
                    observation.see(event)
                    if _is_long(event):
                        await self._encoder.convert(partial(answer.add, event))
                    else:
                        answer.add(event)
        return answer.message()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        prompt = _tokenize_input(request)
        token_ids = await self._encoder.tokenize(prompt, self._known_model(request.model))
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        model = self._known_model(request.model)
        token_ids = checked_token_ids(request.token_ids, "token_ids")
        highest = max(token_ids, default=0)
        if highest >= model.info.vocab_size:
            raise InvalidArgumentError(
                "token_ids",
                f"must be below the vocabulary size {model.info.vocab_size}, got {highest}",
            )
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._encoder.decode(token_ids, model, skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(request.request_ids) > MAX_ABORTED_IDS:
            raise InvalidArgumentError(
                "request_ids", f"at most {MAX_ABORTED_IDS}, got {len(request.request_ids)}"
            )
        aborted = {name for name in request.request_ids if self._live_requests.abort(name)}
        # The others may have come in by another gateway.
        if others := [name for name in request.request_ids if name not in aborted]:
            answers = await asyncio.gather(*(link.abort(others) for link in self._router.links))
            aborted.update(*answers)
        return pb.AbortResponse(
            outcomes=[
                pb.AbortOutcome(
                    request_id=name,
                    outcome=(
                        pb.AbortOutcome.OUTCOME_ABORTED
                        if name in aborted
                        else pb.AbortOutcome.OUTCOME_NOT_FOUND
                    ),
                )
                for name in request.request_ids
            ]
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return model_message(
            self._known_model(""),
            max_message_bytes=self._limits.max_message_bytes,
            gateway_version=tandem_version(),
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        links = self._router.links
        loads = await asyncio.gather(*(link.get_load() for link in links))
        return pb.GetLoadResponse(
            live_requests=len(self._live_requests),
            workers=[
                load_message(link.address, link.is_ready, load)
                for link, load in zip(links, loads, strict=True)
            ],
        )

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        self._router.model()
        freed = await asyncio.gather(*(link.flush_cache() for link in self._router.links))
        # The last worker may have gone before it was asked. One that is away frees nothing,
        # which is right while there are others and must not look like an empty cache if not.
        self._router.model()
        return pb.FlushCacheResponse(pages_freed=sum(freed))

    def _observed(self, method: str, context: Context) -> AbstractContextManager[Observation]:
        span = RequestSpan(self._tracer, method, _traceparent(context))
        return observed(self._metrics, method, span)

    @asynccontextmanager
    async def _events(
        self,
        request: pb.GenerateRequest,
        context: Context,
        observation: Observation,
        outlet: Outlet | None = None,
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """The events of a generation; leaving the block early aborts it.

        A unary call has no outlet.
        """
        arrived_at = time.monotonic()
        request_id = checked_request_id(request.request_id)
        await context.send_initial_metadata((("x-request-id", request_id),))
        observation.request_id = request_id
        checked = generation_request(
            request, request_id, observation.traceparent, is_unary=outlet is None
        )
        timeout_s = self._timeout_s(context)
        arrival = Arrival(arrived_at, timeout_s)
        with request_logging(request_id):
            async with (
                deadline(timeout_s),
                self._generator.generate(checked, arrival, outlet) as events,
            ):
                yield events

    def _timeout_s(self, context: Context) -> float | None:
        remaining_s = context.time_remaining()
        if remaining_s is not None:
            return max(remaining_s, 0.0)
        return self._limits.default_timeout_s or None

    def _known_model(self, name: str) -> ServedModel:
        """Text can be worked on while every worker is away, once the model is known."""
        model = self._router.known_model
        if model is None:
            raise no_worker_error()
        check_model(name, model.info)
        return model


def _tokenize_input(request: pb.TokenizeRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return TextPrompt(request.text, add_special_tokens=add)
        case "chat":
            return chat_prompt(request.chat)
        case _:
            raise InvalidArgumentError("input", "set one of text and chat")


def _is_long(event: Event) -> bool:
    """Whether its message takes too long for the event loop: up to 0.3 s of prompt logprobs."""
    return isinstance(event, Started) and event.prompt_logprobs is not None


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return checked_traceparent(value)
    return ""
