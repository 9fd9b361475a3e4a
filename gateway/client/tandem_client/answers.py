"""Messages of the public contract as plain values. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from shared.pb.tandem.v1 import inference_pb2 as pb
from tandem_client.errors import InternalError
from tandem_client.events import (
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Started,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from tandem_client.service_info import Load, Model, WorkerLoad

_T = TypeVar("_T")

_REASONS: Mapping[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORTED: FinishReason.ABORTED,
    pb.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
}


def event_of(response: pb.GenerateStreamResponse) -> Event | None:
    """None for an event of a kind that this client is too old to know."""
    match response.WhichOneof("event"):
        case "delta":
            return _delta(response.delta)
        case "started":
            return _mirror(
                Started,
                response.started,
                prompt_logprobs=_logprobs(response.started.prompt_logprobs),
            )
        case "finished":
            return _finished(response.finished)
        case _:
            return None


class Gathered:
    """The events of one stream, until it has ended."""

    def __init__(self) -> None:
        self._started: dict[int, Started] = {}
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started[event.index] = event
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event

    def completions(self, n: int) -> list[Completion]:
        """All of them, by index. Raises InternalError when one has no end."""
        return [self._completion(index) for index in range(n)]

    def _completion(self, index: int) -> Completion:
        started, finished = self._started.get(index), self._finished.get(index)
        if started is None or finished is None:
            raise InternalError(f"the stream ended before completion {index} did")
        deltas = self._deltas.get(index, ())
        shown = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        shown_logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
        return Completion(
            request_id=started.request_id,
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=shown + finished.trailing_token_ids,
            logprobs=shown_logprobs + finished.trailing_logprobs,
            prompt_logprobs=started.prompt_logprobs,
            finished=finished,
        )


def model_of(response: pb.GetModelResponse) -> Model:
    return _mirror(
        Model,
        response,
        eos_token_ids=tuple(response.eos_token_ids),
        bos_token_id=response.bos_token_id if response.HasField("bos_token_id") else None,
    )


def load_of(response: pb.GetLoadResponse) -> Load:
    workers = tuple(_mirror(WorkerLoad, worker) for worker in response.workers)
    return Load(response.live_requests, workers)


def abort_outcomes_of(response: pb.AbortResponse) -> dict[str, bool]:
    """By request id, whether it was live and has been ended."""
    return {
        outcome.request_id: outcome.outcome == pb.AbortOutcome.OUTCOME_ABORTED
        for outcome in response.outcomes
    }


def _delta(delta: pb.Delta) -> Delta:
    return Delta(delta.index, delta.text, tuple(delta.token_ids), _logprobs(delta.logprobs))


def _finished(finished: pb.Finished) -> Finished:
    matched = finished.WhichOneof("matched")
    matches = {
        name: getattr(finished, name) if name == matched else None
        for name in ("eos_token_id", "stop_token_id", "stop_string")
    }
    return _mirror(
        Finished,
        finished,
        finish_reason=_REASONS.get(finished.finish_reason, FinishReason.UNKNOWN),
        usage=_mirror(Usage, finished.usage),
        timings=_mirror(Timings, finished.timings),
        trailing_token_ids=tuple(finished.trailing_token_ids),
        trailing_logprobs=_logprobs(finished.trailing_logprobs),
        **matches,
    )


def _logprobs(entries: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            chosen=_mirror(TokenLogprob, entry.chosen),
            top=tuple(_mirror(TokenLogprob, token) for token in entry.top),
        )
        for entry in entries
    )


def _mirror(cls: type[_T], message: ProtoMessage, **converted: Any) -> _T:
    """A dataclass from the message that it was named after, field by field."""
    plain = {
        field.name: getattr(message, field.name)
        for field in fields(cls)  # type: ignore[arg-type]
        if field.name not in converted
    }
    return cls(**plain, **converted)
