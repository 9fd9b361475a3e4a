"""What a client of the public API gets: whole streams, and the details of errors."""

from collections.abc import AsyncIterable
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from shared.pb.tandem.v1 import inference_pb2 as pb


@dataclass
class Collected:
    """A whole stream."""

    started: pb.Started
    deltas: list[pb.Delta]
    finished: pb.Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        shown = [token_id for delta in self.deltas for token_id in delta.token_ids]
        return shown + list(self.finished.trailing_token_ids)

    @property
    def logprobs(self) -> list[pb.TokenLogprobs]:
        shown = [logprobs for delta in self.deltas for logprobs in delta.logprobs]
        return shown + list(self.finished.trailing_logprobs)


async def collect(stream: AsyncIterable[pb.GenerateStreamResponse]) -> Collected:
    """Reads a stream of one completion to its end."""
    (answer,) = await collect_all(stream)
    return answer


async def collect_all(stream: AsyncIterable[pb.GenerateStreamResponse]) -> list[Collected]:
    """Reads a stream to its end: its completions by index."""
    by_index: dict[int, list[pb.GenerateStreamResponse]] = {}
    async for event in stream:
        kind = event.WhichOneof("event")
        assert kind is not None, "an event that is none"
        by_index.setdefault(getattr(event, kind).index, []).append(event)
    assert sorted(by_index) == list(range(len(by_index))), sorted(by_index)
    return [_completion(by_index[index]) for index in sorted(by_index)]


def _completion(events: list[pb.GenerateStreamResponse]) -> Collected:
    """One completion's events, held to the order Started, Delta…, Finished."""
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"], kinds
    deltas = [event.delta for event in events[1:-1]]
    assert all(delta.text for delta in deltas), "an empty delta"
    return Collected(events[0].started, deltas, events[-1].finished)


def violated_fields(error: grpc.aio.AioRpcError) -> list[str]:
    """The fields in an error's BadRequest details."""
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    assert status is not None, "the status has no details"
    assert any(detail.Unpack(bad) for detail in status.details), "no BadRequest"
    return [violation.field for violation in bad.field_violations]


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    """The delay in an error's RetryInfo details."""
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    assert status is not None, "the status has no details"
    assert any(detail.Unpack(retry) for detail in status.details), "no RetryInfo"
    return float(retry.retry_delay.ToTimedelta().total_seconds())
