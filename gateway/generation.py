"""The pipeline of one request, from its admission to its last event."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from gateway.affinity import PromptPrefix
from gateway.completion import Completion, CompletionParams, Event
from gateway.encoding import PromptEncoder
from gateway.live_requests import AbortedEarlyError, LiveRequest, LiveRequests
from gateway.merging import PromptSharing, merged
from gateway.model_checks import check_logprobs, check_model, check_tokens, max_tokens
from gateway.outlet import Outlet
from gateway.request import GenerationRequest, OutputOptions, Submission
from gateway.router import Router
from gateway.served_model import ModelInfo, ServedModel
from gateway.stop import StopMatcher
from gateway.text_stream import TextStream
from gateway.worker_link import WorkerLink
from shared.errors import QueueFullError, ServingError, UnavailableError
from shared.identity import client_identity
from shared.types import SamplingParams

# What the field holds: 49 days, longer than any request lives.
_MAX_TIMEOUT_MS = (1 << 32) - 1
_NUM_SEEDS = 1 << 64


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

    @asynccontextmanager
    async def generate(
        self, request: GenerationRequest, arrival: Arrival, outlet: Outlet | None = None
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Started, Deltas and Finished of each completion; those of several are mixed.

        With an outlet, the Deltas of a single one go there, but for its first and its last.
        Leaving the block before their end aborts at the worker.
        """
        with self._live_requests.admit(request.request_id) as live:
            model = self._router.model()
            check_model(request.model, model.info)
            check_tokens(request, model.info)
            encoding = self._encoder.encode(
                request.prompt, model, keep_last=request.truncate_prompt_tokens
            )
            try:
                prompt_ids = await live.uninterrupted(encoding)
            except AbortedEarlyError:
                yield self._aborted_early(_Job(request, model, [], 0, arrival))
                return
            most = max_tokens(request, len(prompt_ids), model.info)
            check_logprobs(request, len(prompt_ids), most)
            job = _Job(request, model, prompt_ids, most, arrival)
            if request.num_completions == 1:
                async with aclosing(self._complete(job, 0, live, outlet=outlet)) as events:
                    yield events
                return
            sharing = PromptSharing()
            streams = [
                self._complete(job, index, live, sharing)
                for index in range(request.num_completions)
            ]
            async with merged(streams, sharing) as events:
                yield events

    async def _complete(
        self,
        job: "_Job",
        index: int,
        live: LiveRequest,
        sharing: PromptSharing | None = None,
        *,
        outlet: Outlet | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The events of one completion, from whichever worker ends up serving it."""
        completion = self._completion(job, index, sharing)
        tried: list[WorkerLink] = []
        while not completion.is_finished:
            live.check_goes_on()
            if live.is_aborted:
                # No worker had it, or the one that had was lost before it could say so.
                for event in completion.aborted_early():
                    yield event
                return
            preferred = sharing.link if sharing else None
            link = self._router.pick(job.model.info, job.prefix, tried, preferred)
            tried.append(link)
            if sharing is not None and index == 0:
                sharing.link = link
            try:
                with link.open(job.submission(index)) as channel, live.served_by(channel):
                    while not completion.is_finished:
                        await channel.wait()
                        for event in completion.absorb(channel):
                            yield event
                        if outlet is not None:
                            await outlet.carry(completion, channel)
            except (UnavailableError, QueueFullError) as error:
                if not self._may_go_on(error, completion, live, job.model.info, tried):
                    raise
        if completion.was_aborted:
            # The others end with it, those that are not begun, too.
            live.is_aborted = True

    def _may_go_on(
        self,
        error: ServingError,
        completion: Completion,
        live: LiveRequest,
        model: ModelInfo,
        tried: list[WorkerLink],
    ) -> bool:
        """Only before the first token: after it, another worker might sample other text."""
        if completion.has_tokens or live.is_final:
            return False
        with_room = isinstance(error, QueueFullError)
        if with_room and not error.retry_after_ms:
            # No queue was full: the request itself is too much.
            return False
        return live.is_aborted or self._router.has_other(model, tried, with_room=with_room)

    async def _aborted_early(self, job: "_Job") -> AsyncIterator[Event]:
        for index in range(job.request.num_completions):
            for event in self._completion(job, index).aborted_early():
                yield event

    def _completion(
        self, job: "_Job", index: int, sharing: PromptSharing | None = None
    ) -> Completion:
        request, tokenizer, stop = job.request, job.model.tokenizer, job.request.stop
        matcher = (
            StopMatcher(stop.stop_strings, include_stop_string=stop.include_stop_string)
            if stop.stop_strings
            else None
        )
        detokenizer = tokenizer.detokenizer(skip_special_tokens=request.output.skip_special_tokens)
        params = CompletionParams(
            request_id=request.request_id,
            index=index,
            num_prompt_tokens=len(job.prompt_ids),
            seed=job.sampling(index).seed,
            arrived_at=job.arrival.at,
            max_delta_tokens=self._max_delta_tokens,
            output=job.output(index),
            token_bytes=tokenizer.token_bytes,
        )
        return Completion(
            params,
            TextStream(detokenizer, matcher, stop.min_tokens),
            on_first_token=sharing.prompt_is_cached.set if sharing and index == 0 else None,
        )


class _Job:
    """A request whose prompt is encoded: what each of its completions asks a worker for."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ServedModel,
        prompt_ids: list[int],
        max_tokens: int,
        arrival: Arrival,
    ) -> None:
        self.request = request
        self.model = model
        self.prompt_ids = prompt_ids
        self.prefix = PromptPrefix(prompt_ids, request.cache_salt)
        self.arrival = arrival
        self._max_tokens = max_tokens
        self._submitted_at: float | None = None

    def sampling(self, index: int) -> SamplingParams:
        """Every completion draws by a seed of its own, with which it can be asked for alone."""
        sampling = self.request.sampling
        return replace(sampling, seed=(sampling.seed + index) % _NUM_SEEDS) if index else sampling

    def output(self, index: int) -> OutputOptions:
        """All completions have the same prompt, so its log-probabilities come with the first;
        the others may then take the prompt from the prefix cache."""
        output = self.request.output
        return replace(output, prompt_logprobs=None) if index else output

    def submission(self, index: int) -> Submission:
        """To be sent now: what is left of its times is worked out here."""
        request, output, now = self.request, self.output(index), time.monotonic()
        if self._submitted_at is None:
            self._submitted_at = now
        time_limit_ms = request.time_limit_ms
        if time_limit_ms:
            # A later completion, or a second worker, has what the first has left.
            time_limit_ms = max(1, time_limit_ms - round(1e3 * (now - self._submitted_at)))
        timeout_ms = 0
        if self.arrival.timeout_s is not None:
            # Encoding has taken its part of it.
            left_s = self.arrival.timeout_s - (now - self.arrival.at)
            timeout_ms = max(1, round(min(1e3 * left_s, _MAX_TIMEOUT_MS)))
        return Submission(
            request_id=request.request_id,
            index=index,
            prompt_token_ids=self.prompt_ids,
            max_tokens=self._max_tokens,
            sampling=self.sampling(index),
            stop_token_ids=request.stop.stop_token_ids,
            ignore_eos=request.stop.ignore_eos,
            min_tokens=request.stop.min_tokens,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            structured_output=request.structured_output,
            priority=request.priority,
            cache_salt=request.cache_salt,
            time_limit_ms=time_limit_ms,
            timeout_ms=timeout_ms,
            traceparent=request.traceparent,
            client=client_identity(),
        )
