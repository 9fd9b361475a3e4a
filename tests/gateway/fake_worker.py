"""A worker without an engine: speaks tandem.worker.v1 and does what a test tells it.

By itself it echoes: the i-th output token is the i-th prompt token, then eos. With
`echoes=False` it only keeps what it was sent, and the test sends tokens and ends.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import grpc

from gateway.tokenizer_store import bundle_digest
from shared.auth import BearerTokenInterceptor
from shared.errors import Code
from shared.interceptors import server_interceptors
from shared.notifier import Notifier
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from shared.tasks import TaskSet
from shared.tls import ServerTls, server_credentials

EOS = 2
CHUNK_BYTES = 1 << 20

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Received:
    """One request as the worker got it, and the way back for its answers."""

    def __init__(self, submit: pb.Submit, outbox: "asyncio.Queue[pb.RunResponse | None]") -> None:
        self.submit = submit
        # None: not aborted; else whether a reply was asked for.
        self.abort_reply: bool | None = None
        self.num_sent = 0
        self.has_ended = False
        self.sends_logprobs = True
        self._outbox = outbox

    def start(self, *, cached_tokens: int = 0, queue_position: int = 0) -> None:
        """With the prompt's logprobs behind it, where they are asked for."""
        started = pb.RequestStarted(
            handle=self.submit.handle,
            cached_tokens=cached_tokens,
            queue_position=queue_position,
            queue_ms=1.5,
        )
        self.send_output(pb.StepOutput(started=[started]))
        if self.submit.HasField("prompt_logprobs") and self.sends_logprobs:
            rest = self.submit.prompt_token_ids[1:]
            # In parts, as the chunks of a long prompt give them.
            for part in (rest[:2], rest[2:]):
                self.send_prompt_logprobs(part)

    def send_prompt_logprobs(self, token_ids: Sequence[int]) -> None:
        logprobs = self._logprobs(token_ids, self.submit.prompt_logprobs, prompt=True)
        self.send_output(pb.StepOutput(logprobs=[logprobs]))

    def send_tokens(self, token_ids: Sequence[int], *, also_ended_by: int | None = None) -> None:
        """All in one step output; `also_ended_by` has only its logprobs there."""
        self.send_output(self.output_of(token_ids, also_ended_by=also_ended_by))

    def output_of(
        self, token_ids: Sequence[int], *, also_ended_by: int | None = None
    ) -> pb.StepOutput:
        """The same, to be sent by the test."""
        self.num_sent += len(token_ids)
        output = pb.StepOutput(handles=[self.submit.handle] * len(token_ids), token_ids=token_ids)
        if self.submit.HasField("logprobs") and self.sends_logprobs:
            ended_by = [] if also_ended_by is None else [also_ended_by]
            output.logprobs.append(
                self._logprobs([*token_ids, *ended_by], self.submit.logprobs, prompt=False)
            )
        return output

    def finish(
        self, reason: "pb.FinishReason" = pb.FINISH_REASON_LENGTH, matched: int | None = None
    ) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        finished = pb.RequestFinished(
            handle=self.submit.handle,
            reason=reason,
            matched_token_id=matched or 0,
            completion_tokens=self.num_sent + (matched is not None),
            queue_ms=1.5,
            prefill_ms=2.5,
            decode_ms=3.5,
        )
        self.send_output(pb.StepOutput(finished=[finished]))

    def fail(self, code: Code, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        self.has_ended = True
        failure = pb.Failure(code=code, message=message, field=field, retry_after_ms=retry_after_ms)
        failed = pb.RequestFailed(handle=self.submit.handle, failure=failure)
        self.send_output(pb.StepOutput(failed=[failed]))

    def reject(self, code: Code, message: str, *, retry_after_ms: int = 0) -> None:
        self.has_ended = True
        failure = pb.Failure(code=code, message=message, retry_after_ms=retry_after_ms)
        rejected = pb.Rejected(handle=self.submit.handle, failure=failure)
        self._outbox.put_nowait(pb.RunResponse(rejected=rejected))

    async def echo(self, step_s: float) -> None:
        self.start()
        for token_id in self.submit.prompt_token_ids:
            if self.has_ended or self.abort_reply is not None:
                return
            if token_id == EOS and not self.submit.ignore_eos:
                break
            if token_id in self.submit.stop_token_ids:
                self.finish(pb.FINISH_REASON_STOP_TOKEN, token_id)
                return
            self.send_tokens([token_id])
            if self.num_sent == self.submit.max_tokens:
                self.finish()
                return
            await asyncio.sleep(step_s)
        self.finish(pb.FINISH_REASON_EOS, EOS)

    def _logprobs(
        self, token_ids: Sequence[int], num_top: int, *, prompt: bool
    ) -> pb.TokenLogprobs:
        """Of a token t, logprob -t; beside it t + 1, t + 2, … with logprobs 0, -1, -1, -3, …"""
        return pb.TokenLogprobs(
            handle=self.submit.handle,
            prompt=prompt,
            token_ids=token_ids,
            logprobs=[-float(token_id) for token_id in token_ids],
            ranks=[token_id % 9 + 1 for token_id in token_ids],
            num_top=num_top,
            top_token_ids=[token_id + 1 + i for token_id in token_ids for i in range(num_top)],
            top_logprobs=[-float(i if i != 2 else 1) for _ in token_ids for i in range(num_top)],
        )

    def send_output(self, output: pb.StepOutput) -> None:
        self._outbox.put_nowait(pb.RunResponse(output=output))


class FakeWorker(pb_grpc.WorkerServiceServicer):
    """A worker on loopback, in this event loop."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        vocab_size: int = 49152,
        max_context: int = 256,
        echoes: bool = True,
        step_s: float = 0.0,
        name: str = "fake",
        tls: ServerTls | None = None,
        client_of: Callable[[str], str | None] | None = None,
    ) -> None:
        self.files = dict(files)
        self.model = pb.GetModelResponse(
            model=name,
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            vocab_size=vocab_size,
            max_context_tokens=max_context,
            eos_token_ids=[EOS],
            default_max_tokens=64,
            tokenizer_sha256=bundle_digest(files),
            version="0",
        )
        self.requests: list[Received] = []
        self.num_tokenizer_fetches = 0
        self.num_links = 0
        self.answers_pings = True
        self.answers_aborts = True
        self.port = 0
        self.num_refusals = 0
        self.tls = tls
        # Tells whose a token is; None: calls need none.
        self.client_of = client_of
        self._echoes = echoes
        self._step_s = step_s
        self._changed = Notifier()
        self._outboxes: set[asyncio.Queue[pb.RunResponse | None]] = set()
        self._server: grpc.aio.Server | None = None
        self._tasks = TaskSet()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """On the same port as before, if there was one."""
        interceptors = server_interceptors()
        if self.client_of is not None:
            interceptors.append(BearerTokenInterceptor(self.client_of, self._refuse))
        self._server = grpc.aio.server(
            interceptors=interceptors, options=[("grpc.so_reuseport", 0)]
        )
        pb_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._bind(self._server, f"127.0.0.1:{self.port}")
        await self._server.start()

    async def crash(self) -> None:
        """Every connection breaks."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        await self._tasks.cancel()

    def close_links(self) -> None:
        """Ends every Run stream in good order."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    def report_ready(self, ready: bool) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(pb.RunResponse(load=pb.GetLoadResponse(ready=ready)))

    def report_prefixes(self, fingerprints: Sequence[int]) -> None:
        hashes = b"".join(one.to_bytes(4, "little") for one in fingerprints)
        for outbox in self._outboxes:
            outbox.put_nowait(pb.RunResponse(prefixes=pb.CachedPrefixes(hashes=hashes)))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when what this worker received makes the condition true."""
        async with asyncio.timeout(10):
            await self._changed.until(condition)

    async def request(self, index: int = 0) -> Received:
        """The index-th request since the beginning, once it is there."""
        await self.until(lambda: len(self.requests) > index)
        return self.requests[index]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.crash()

    async def Run(
        self, requests: AsyncIterator[pb.RunRequest], context: Context
    ) -> AsyncIterator[pb.RunResponse]:
        outbox: asyncio.Queue[pb.RunResponse | None] = asyncio.Queue()
        self._outboxes.add(outbox)
        self.num_links += 1
        outbox.put_nowait(pb.RunResponse(load=pb.GetLoadResponse(ready=True)))
        reader = self._tasks.start(self._receive(requests, outbox), name="fake worker")
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            self._changed.notify()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return self.model

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        self.num_tokenizer_fetches += 1
        for name, content in self.files.items():
            for begin in range(0, len(content), CHUNK_BYTES):
                yield pb.GetTokenizerResponse(
                    file_name=name,
                    chunk=content[begin : begin + CHUNK_BYTES],
                    sha256=self.model.tokenizer_sha256,
                )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        running = sum(not received.has_ended for received in self.requests)
        return pb.GetLoadResponse(ready=True, running=running, pages_total=10, pages_free=10)

    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(pages_freed=7)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        aborted = []
        for received in self.requests:
            if received.submit.request_id in request.request_ids and not received.has_ended:
                aborted.append(received.submit.request_id)
                received.finish(pb.FINISH_REASON_ABORTED)
        return pb.AbortResponse(aborted_request_ids=aborted)

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        if self.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(self.tls, lambda _: None))

    def _refuse(self) -> None:
        self.num_refusals += 1
        self._changed.notify()

    async def _receive(
        self,
        requests: AsyncIterator[pb.RunRequest],
        outbox: "asyncio.Queue[pb.RunResponse | None]",
    ) -> None:
        by_handle: dict[int, Received] = {}
        async for request in requests:
            match request.WhichOneof("command"):
                case "submit":
                    received = Received(request.submit, outbox)
                    by_handle[request.submit.handle] = received
                    self.requests.append(received)
                    if self._echoes:
                        self._tasks.start(received.echo(self._step_s), name="echo")
                case "abort":
                    for handle in request.abort.handles:
                        by_handle[handle].abort_reply = request.abort.reply
                        if not self.answers_aborts:
                            continue
                        if request.abort.reply:
                            by_handle[handle].finish(pb.FINISH_REASON_ABORTED)
                        by_handle[handle].has_ended = True
                case "ping" if self.answers_pings:
                    pong = pb.Pong(nonce=request.ping.nonce)
                    outbox.put_nowait(pb.RunResponse(pong=pong))
            self._changed.notify()
