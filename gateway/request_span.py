"""What a collector of traces sees of one generation in the gateway."""

import time
from collections.abc import Sequence

from gateway.completion import Finished
from shared.errors import Code
from shared.tracing import Attributes, Tracer

_SERVICE = "tandem.v1.InferenceService"
# The others are the caller's doing, or no error at all.
_FAULTS = {
    code.name
    for code in (Code.INTERNAL, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED)
}


class RequestSpan:
    """A span from the arrival to the end; without a tracer, what the caller sent passes on."""

    def __init__(self, tracer: Tracer | None, method: str, traceparent: str) -> None:
        self._method = method
        self._started_at = time.monotonic()
        self._span = None
        # For the worker, whose span is a part of this one.
        self.traceparent = traceparent
        if tracer is not None:
            self._span = tracer.start(
                f"{_SERVICE}/{method}", parent=traceparent, started_at=self._started_at
            )
            self.traceparent = self._span.traceparent

    def end(
        self, outcome: str, *, request_id: str, client: str, finished: Sequence[Finished]
    ) -> None:
        """Once, however the generation ended."""
        if self._span is None:
            return
        attributes: dict[str, str | int | float | bool] = {
            "rpc.system": "grpc",
            "rpc.service": _SERVICE,
            "rpc.method": self._method,
            "tandem.request_id": request_id,
            "tandem.outcome": outcome,
        }
        if client:
            attributes["tandem.client"] = client
        if finished:
            attributes |= _usage(finished)
            if finished[0].completion_tokens:
                first_token_s = 1e-3 * finished[0].timings.time_to_first_token_ms
                self._span.add_event("first token", self._started_at + first_token_s)
        error = outcome if outcome in _FAULTS else ""
        self._span.end(time.monotonic(), attributes, error)


def _usage(finished: Sequence[Finished]) -> Attributes:
    """Of several completions the tokens of all, and the times of the first."""
    first = min(finished, key=lambda one: one.index)
    return {
        "gen_ai.usage.input_tokens": first.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in finished),
        "tandem.cached_tokens": first.cached_tokens,
        "tandem.queue_ms": first.timings.queue_ms,
        "tandem.prefill_ms": first.timings.prefill_ms,
        "tandem.decode_ms": first.timings.decode_ms,
    }
