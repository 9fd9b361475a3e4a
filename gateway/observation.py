"""Counts each generation by how it ended, and times it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.completion import Delta, Event, Finished, Started
from gateway.request_span import RequestSpan
from shared.errors import ServingError
from shared.identity import client_identity, token_identity
from shared.metrics import GenerationMetrics


class Observation:
    """What was seen of one generation."""

    def __init__(self, metrics: GenerationMetrics, method: str, span: RequestSpan) -> None:
        self._metrics = metrics
        self._method = method
        self._span = span
        # Known once it has been checked.
        self.request_id = ""
        # One for each completion.
        self._finished: list[Finished] = []
        self._num_tokens = 0
        self._num_deltas = 0
        self._prompt_tokens = 0

    @property
    def traceparent(self) -> str:
        """For the worker that serves it."""
        return self._span.traceparent

    def see(self, event: Event) -> None:
        """Called once for each event; counted at the end, as counters take locks."""
        match event:
            case Delta():
                self._num_deltas += 1
                self._num_tokens += len(event.token_ids)
            case Started():
                self._prompt_tokens = event.prompt_tokens
            case Finished():
                self._finished.append(event)

    def count(self, outcome: str, duration_s: float) -> None:
        """Once, when the generation has ended, however it did."""
        self._span.end(
            outcome,
            request_id=self.request_id,
            client=client_identity(),
            finished=self._finished,
        )
        metrics = self._metrics
        metrics.requests.labels(self._method, outcome).inc()
        metrics.request_duration.observe(duration_s)
        metrics.messages.inc(self._num_deltas)
        metrics.generation_tokens.inc(self._num_tokens)
        metrics.prompt_tokens.inc(self._prompt_tokens)
        if client := token_identity():
            metrics.client_requests.labels(client, outcome).inc()
            metrics.client_tokens.labels(client).inc(self._num_tokens)
        for finished in self._finished:
            timings, num_tokens = finished.timings, finished.completion_tokens
            if num_tokens:
                metrics.time_to_first_token.observe(1e-3 * timings.time_to_first_token_ms)
            if num_tokens > 1:
                metrics.inter_token_latency.observe(1e-3 * timings.decode_ms / (num_tokens - 1))

    @property
    def finish_reason(self) -> str:
        """Of the completion that ended last."""
        return self._finished[-1].reason.name if self._finished else "UNFINISHED"


@contextmanager
def observed(metrics: GenerationMetrics, method: str, span: RequestSpan) -> Iterator[Observation]:
    """Counts the block as one generation, and ends its span."""
    observation = Observation(metrics, method, span)
    begin = time.monotonic()
    outcome = "INTERNAL"
    try:
        yield observation
        outcome = observation.finish_reason
    except ServingError as error:
        outcome = error.code.name
        raise
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "CANCELLED"
        raise
    finally:
        observation.count(outcome, time.monotonic() - begin)
