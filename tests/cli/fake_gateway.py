"""A gateway that says what a test tells it to, and keeps what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from shared.errors import ServingError
from shared.interceptors import server_interceptors
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class FakeGateway(pb_grpc.InferenceServiceServicer):
    """Answers every request with `pieces`, or fails with `error` after them.

    Of several completions, the last gets its pieces first, each told apart by its index.
    """

    pieces: Sequence[str] = ("Par", "is", ".")
    error: ServingError | None = None
    # Cleared, it holds every answer after its first piece.
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    address: str = ""

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.requests.append(request)
        try:
            indices = range(max(request.n, 1))
            for index in indices:
                started = pb.Started(index=index, request_id="r1", prompt_tokens=5)
                yield pb.GenerateStreamResponse(started=started)
            for index in reversed(indices):
                for piece in self.pieces:
                    yield pb.GenerateStreamResponse(delta=self._delta(request, index, piece))
                    await self.go_on.wait()
            if self.error is not None:
                raise self.error
            for index in reversed(indices):
                yield pb.GenerateStreamResponse(finished=self._finished(index))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        if self.error is not None:
            raise self.error
        return pb.GetModelResponse(model="tiny", dtype="float32", eos_token_ids=[2, 7])

    def _delta(self, request: pb.GenerateRequest, index: int, piece: str) -> pb.Delta:
        delta = pb.Delta(index=index, text=f"{index}{piece}" if request.n > 1 else piece)
        if request.output.HasField("logprobs"):
            other = pb.TokenLogprob(token_id=8, text="[\x1b", token_bytes=b"[\x1b", rank=1)
            delta.logprobs.add(
                chosen=pb.TokenLogprob(
                    token_id=7, text=piece, token_bytes=piece.encode(), logprob=-0.5, rank=2
                ),
                top=[other] * request.output.logprobs,
            )
        return delta

    def _finished(self, index: int = 0) -> pb.Finished:
        return pb.Finished(
            index=index,
            finish_reason=pb.FINISH_REASON_STOP,
            eos_token_id=2,
            usage=pb.Usage(prompt_tokens=5, completion_tokens=4),
            timings=pb.Timings(time_to_first_token_ms=12, decode_ms=100),
            seed=2**63,
        )


async def serve_fake(gateway: FakeGateway) -> grpc.aio.Server:
    """Starts it on a free port and writes its address into it."""
    server = grpc.aio.server(interceptors=server_interceptors())
    pb_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    gateway.address = f"127.0.0.1:{port}"
    await server.start()
    return server
