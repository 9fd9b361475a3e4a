"""What a collector of traces sees of each request in a worker: queue, prefill, decode.

Made when a request ends, from the engine's own times; in between it costs an entry in a
dict. Without a tracer, nothing.
"""

import time
from dataclasses import dataclass

from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.tracing import Tracer, checked_traceparent
from worker.messages import Failed, Finished


@dataclass(frozen=True, slots=True)
class _Open:
    request_id: str
    traceparent: str
    num_prompt_tokens: int
    arrived_at: float


class RequestSpans:
    """The spans of the requests that live."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._open: dict[int, _Open] = {}

    def open(self, uid: int, submit: pb.Submit) -> None:
        """The request was accepted."""
        if self._tracer is not None:
            self._open[uid] = _Open(
                submit.request_id,
                checked_traceparent(submit.traceparent),
                len(submit.prompt_token_ids),
                time.monotonic(),
            )

    def close(self, uid: int, ended: Finished | Failed | None) -> None:
        """The request has ended; None: nobody waits for it any more. Idempotent."""
        begun = self._open.pop(uid, None)
        if begun is None or self._tracer is None:
            return
        now, at = time.monotonic(), begun.arrived_at
        span = self._tracer.start("generate", parent=begun.traceparent, started_at=at)
        attributes: dict[str, str | int | float | bool] = {
            "tandem.request_id": begun.request_id,
            "tandem.prompt_tokens": begun.num_prompt_tokens,
        }
        error = ""
        match ended:
            case Finished():
                for name, seconds in (
                    ("queue", ended.queue_s),
                    ("prefill", ended.prefill_s),
                    ("decode", ended.decode_s),
                ):
                    span.add_child(name, at, at + seconds)
                    at += seconds
                attributes["tandem.outcome"] = ended.reason.name
                attributes["tandem.cached_tokens"] = ended.cached_tokens
                attributes["tandem.completion_tokens"] = ended.completion_tokens
            case Failed():
                attributes["tandem.outcome"] = error = ended.code.name
            case None:
                attributes["tandem.outcome"] = "ABANDONED"
        span.end(now, attributes, error)
