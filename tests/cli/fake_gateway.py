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
    """Answers every request with `pieces`, or fails with `error` after them."""

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
            yield pb.GenerateStreamResponse(started=pb.Started(request_id="r1", prompt_tokens=5))
            for piece in self.pieces:
                yield pb.GenerateStreamResponse(delta=pb.Delta(text=piece))
                await self.go_on.wait()
            if self.error is not None:
                raise self.error
            yield pb.GenerateStreamResponse(finished=self._finished())
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        if self.error is not None:
            raise self.error
        return pb.GetModelResponse(model="tiny", dtype="float32", eos_token_ids=[2, 7])

    def _finished(self) -> pb.Finished:
        return pb.Finished(
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
