"""The pipeline of one request, from its admission to its last event."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from gateway.completion import Completion, Event
from gateway.encoding import PromptEncoder
from gateway.live_requests import AbortedEarlyError, LiveRequest, LiveRequests
from gateway.request import GenerationRequest, Submission
from gateway.router import Router
from gateway.served_model import ModelInfo, ServedModel
from gateway.stop import StopMatcher
from gateway.text_stream import TextStream
from gateway.worker_link import WorkerLink
from shared.errors import InvalidArgumentError, NotFoundError, UnavailableError

# What the field holds: 49 days, longer than any request lives.
_MAX_TIMEOUT_MS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, and how long its client will wait for it."""

    # time.monotonic()
    at: float
    # None: for ever.
    timeout_s: float | None


class Generator:
    """Runs requests on workers; every accepted one ends in one Finished or one error."""

    def __init__(
        self,
        router: Router,
        encoder: PromptEncoder,
        live_requests: LiveRequests,
        *,
        max_delta_tokens: int,
    ) -> None:
        self._router = router
        self._encoder = encoder
        self._live_requests = live_requests
        self._max_delta_tokens = max_delta_tokens

    async def generate(
        self, request: GenerationRequest, arrival: Arrival
    ) -> AsyncGenerator[Event, None]:
        """Started, Deltas and Finished. Closing it before its end aborts at the worker."""
        with self._live_requests.admit(request.request_id) as live:
            model = self._router.model()
            check_model(request.model, model.info)
            _check_stop_ids(request, model.info)
            try:
                prompt_ids = await live.uninterrupted(self._encoder.encode(request.prompt, model))
            except AbortedEarlyError:
                for event in self._completion(request, model, [], arrival).aborted_early():
                    yield event
                return
            submission = _submission(request, prompt_ids, model.info, arrival)
            completion = self._completion(request, model, prompt_ids, arrival)
            tried: list[WorkerLink] = []
            while not completion.is_finished:
                if live.is_aborted:
                    # Its worker was lost before it could say so.
                    for event in completion.aborted_early():
                        yield event
                    return
                link = self._router.pick(model.info, tried)
                tried.append(link)
                try:
                    with link.open(submission) as channel, live.served_by(channel):
                        while not completion.is_finished:
                            await channel.wait()
                            for event in completion.absorb(channel):
                                yield event
                except UnavailableError:
                    if not self._may_go_on(completion, live, model.info, tried):
                        raise

    def _may_go_on(
        self,
        completion: Completion,
        live: LiveRequest,
        model: ModelInfo,
        tried: list[WorkerLink],
    ) -> bool:
        """Only before the first token: after it, another worker might sample other text."""
        if completion.has_tokens or live.is_final:
            return False
        return live.is_aborted or self._router.has_other(model, tried)

    def _completion(
        self,
        request: GenerationRequest,
        model: ServedModel,
        prompt_ids: list[int],
        arrival: Arrival,
    ) -> Completion:
        stop = request.stop
        matcher = (
            StopMatcher(stop.stop_strings, include_stop_string=stop.include_stop_string)
            if stop.stop_strings
            else None
        )
        detokenizer = model.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        return Completion(
            request.request_id,
            text=TextStream(detokenizer, matcher),
            num_prompt_tokens=len(prompt_ids),
            seed=request.sampling.seed,
            arrived_at=arrival.at,
            max_delta_tokens=self._max_delta_tokens,
        )


def check_model(name: str, served: ModelInfo) -> None:
    """Raises NotFoundError unless the name is empty or the served model's."""
    if name and name != served.name:
        raise NotFoundError(
            f"model: {name!r} is not served here; {served.name!r} is", field="model"
        )


def _check_stop_ids(request: GenerationRequest, model: ModelInfo) -> None:
    for index, token_id in enumerate(request.stop.stop_token_ids):
        if token_id >= model.vocab_size:
            raise InvalidArgumentError(
                f"stopping.stop_token_ids[{index}]",
                f"must be below the vocabulary size {model.vocab_size}, got {token_id}",
            )


def _submission(
    request: GenerationRequest, prompt_ids: list[int], model: ModelInfo, arrival: Arrival
) -> Submission:
    wanted = model.default_max_tokens if request.max_tokens is None else request.max_tokens
    timeout_ms = 0
    if arrival.timeout_s is not None:
        # Encoding has taken its part of it.
        left_s = arrival.timeout_s - (time.monotonic() - arrival.at)
        timeout_ms = max(1, round(min(1e3 * left_s, _MAX_TIMEOUT_MS)))
    return Submission(
        request_id=request.request_id,
        prompt_token_ids=prompt_ids,
        max_tokens=min(wanted, model.max_context_tokens - len(prompt_ids)),
        sampling=request.sampling,
        stop_token_ids=request.stop.stop_token_ids,
        ignore_eos=request.stop.ignore_eos,
        priority=request.priority,
        cache_salt=request.cache_salt,
        time_limit_ms=request.time_limit_ms,
        timeout_ms=timeout_ms,
        traceparent=request.traceparent,
    )
