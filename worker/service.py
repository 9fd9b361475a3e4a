"""WorkerService: protobuf in and out, nothing decided here."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from shared.errors import InvalidArgumentError, ServingError
from shared.limits import MAX_ABORTED_IDS
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from shared.tasks import TaskSet
from worker.dispatcher import Dispatcher
from worker.link import Link

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
MAX_TOKENIZER_CHUNK_BYTES = 1 << 20
MAX_TRACE_STEPS = 10_000

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """What GetModel says beyond what the engine says of itself."""

    default_max_tokens: int
    max_waiting: int
    version: str


class WorkerService(pb_grpc.WorkerServiceServicer):
    """The internal contract, over a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, limits: ServedLimits) -> None:
        self._dispatcher = dispatcher
        self._limits = limits

    async def Run(self, request_iterator: AsyncIterator[pb.RunRequest], context: Context) -> None:
        link = self._dispatcher.open_link()
        try:
            async with TaskSet(on_error=lambda _: link.drop(_LINK_FAULT)) as tasks:
                tasks.start(self._read(link, request_iterator), name=f"read link {link.link_id}")
                tasks.start(self._send(link, context), name=f"send link {link.link_id}")
                await link.ended()
        finally:
            self._dispatcher.close_link(link)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        ready, instance_id = self._dispatcher.ready()
        model, engine = ready.model, ready.engine
        return pb.GetModelResponse(
            model=model.name,
            architecture=model.architecture,
            dtype=model.dtype,
            device=model.device,
            vocab_size=engine.vocab_size,
            max_context_tokens=engine.max_context,
            eos_token_ids=model.eos_token_ids,
            default_max_tokens=self._limits.default_max_tokens,
            tokenizer_sha256=ready.tokenizer.sha256,
            version=self._limits.version,
            overlap_scheduling=model.overlap_scheduling,
            page_size=engine.page_size,
            max_running=engine.max_rows,
            max_waiting=self._limits.max_waiting,
            instance_id=instance_id,
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> None:
        ready, _ = self._dispatcher.ready()
        bundle = ready.tokenizer
        for name, content in bundle.files.items():
            # An empty file is one empty chunk.
            for start in range(0, max(len(content), 1), MAX_TOKENIZER_CHUNK_BYTES):
                chunk = content[start : start + MAX_TOKENIZER_CHUNK_BYTES]
                await context.write(
                    pb.GetTokenizerResponse(file_name=name, chunk=chunk, sha256=bundle.sha256)
                )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return self._dispatcher.load_response()

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(pages_freed=await self._dispatcher.flush_cache())

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(request.request_ids) > MAX_ABORTED_IDS:
            raise InvalidArgumentError(
                "request_ids", f"at most {MAX_ABORTED_IDS}, got {len(request.request_ids)}"
            )
        aborted = self._dispatcher.abort_ids(request.request_ids)
        return pb.AbortResponse(aborted_request_ids=aborted)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        return pb.DrainResponse(live_requests=self._dispatcher.drain())

    async def Trace(self, request: pb.TraceRequest, context: Context) -> pb.TraceResponse:
        if not 1 <= request.num_steps <= MAX_TRACE_STEPS:
            raise InvalidArgumentError(
                "num_steps", f"must be 1 to {MAX_TRACE_STEPS}, got {request.num_steps}"
            )
        return pb.TraceResponse(trace_json_gz=await self._dispatcher.trace(request.num_steps))

    async def _send(self, link: Link, context: Context) -> None:
        try:
            await link.send_all(context.write)
        except grpc.aio.InternalError:
            # The call ended as something was being written. It is nobody's fault, and nobody
            # is left to be told.
            link.drop(None)

    async def _read(self, link: Link, requests: AsyncIterator[pb.RunRequest]) -> None:
        try:
            async for request in requests:
                self._dispatcher.obey(link, request)
                await link.has_room()
        except ServingError as error:
            # A command that makes no sense ends its link, and nothing else.
            link.close(error)
        else:
            link.half_close()


_LINK_FAULT = ServingError("internal error on this stream; the server's log has the details")
