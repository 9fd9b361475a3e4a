"""What the front's tests start and ask: a worker on loopback, and a gateway's Run stream."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from shared.tracing import Tracer
from worker.config import WorkerConfig, resolve
from worker.engine_main import run_engine
from worker.engine_process import EngineProcess
from worker.server import serve

TIMEOUT_S = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Outcome:
    """Everything that was heard of one handle."""

    accepted: bool = False
    queue_position: int = 0
    token_ids: list[int] = field(default_factory=list)
    # (token id, logprob, rank) of each entry.
    logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    started: int = 0
    finished: list[pb.RequestFinished] = field(default_factory=list)
    failures: list[pb.Failure] = field(default_factory=list)

    @property
    def num_endings(self) -> int:
        return len(self.finished) + len(self.failures)

    @property
    def failure(self) -> pb.Failure:
        assert len(self.failures) == 1 and not self.finished, self
        return self.failures[0]

    @property
    def reason(self) -> pb.FinishReason:
        assert len(self.finished) == 1 and not self.failures, self
        return self.finished[0].reason


class GatewayLink:
    """A gateway's end of one Run stream; `heard` holds what came, by handle."""

    def __init__(self, stub: pb_grpc.WorkerServiceStub) -> None:
        self.call = stub.Run()
        self.heard: dict[int, Outcome] = {}
        self.loads: list[pb.GetLoadResponse] = []
        self.prefixes: list[bytes] = []
        self.pongs: list[int] = []
        self.num_outputs = 0

    async def send(self, **command: Any) -> None:
        await self.call.write(pb.RunRequest(**command))

    async def submit(
        self, handle: int, prompt: Sequence[int] = (10, 11, 12), **fields: Any
    ) -> None:
        """With greedy sampling, the handle as request id and 64 tokens, unless `fields` say so."""
        values = {
            "request_id": f"request-{handle}",
            "max_tokens": 64,
            "sampling": neutral_sampling(),
        }
        submit = pb.Submit(handle=handle, prompt_token_ids=prompt, **{**values, **fields})
        await self.send(submit=submit)

    async def abort(self, *handles: int, reply: bool) -> None:
        await self.send(abort=pb.AbortHandles(handles=handles, reply=reply))

    async def outcome(self, handle: int) -> Outcome:
        """Reads until this handle has ended."""
        await self.until(lambda: self[handle].num_endings > 0)
        return self[handle]

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Reads until the predicate holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while not predicate():
                await self.hear_one()

    async def ending(self) -> grpc.StatusCode:
        """Reads to the stream's end and tells its status."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while (response := await self.call.read()) is not grpc.aio.EOF:
                    self._hear(response)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return cast(grpc.StatusCode, await self.call.code())

    async def hear_one(self) -> None:
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "the stream has ended"
        self._hear(response)

    def _hear(self, response: pb.RunResponse) -> None:
        match response.WhichOneof("event"):
            case "accepted":
                self[response.accepted.handle].accepted = True
                self[response.accepted.handle].queue_position = response.accepted.queue_position
            case "rejected":
                self[response.rejected.handle].failures.append(response.rejected.failure)
            case "output":
                self._hear_output(response.output)
            case "load":
                self.loads.append(response.load)
            case "prefixes":
                self.prefixes.append(response.prefixes.hashes)
            case "pong":
                self.pongs.append(response.pong.nonce)

    def __getitem__(self, handle: int) -> Outcome:
        return self.heard.setdefault(handle, Outcome())

    def _hear_output(self, output: pb.StepOutput) -> None:
        self.num_outputs += 1
        for started in output.started:
            self[started.handle].started += 1
        for handle, token_id in zip(output.handles, output.token_ids, strict=True):
            assert self[handle].accepted and not self[handle].num_endings
            self[handle].token_ids.append(token_id)
        for logprobs in output.logprobs:
            self._hear_logprobs(logprobs)
        for handle in set(output.handles):
            entries = self[handle].logprobs
            assert not entries or [e[0] for e in entries] == self[handle].token_ids
        for finished in output.finished:
            self[finished.handle].finished.append(finished)
        for failed in output.failed:
            self[failed.handle].failures.append(failed.failure)

    def _hear_logprobs(self, logprobs: pb.TokenLogprobs) -> None:
        outcome = self[logprobs.handle]
        entries = zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, strict=True)
        (outcome.prompt_logprobs if logprobs.prompt else outcome.logprobs).extend(entries)
        assert len(logprobs.top_token_ids) == logprobs.num_top * len(logprobs.token_ids)


@dataclass
class FrontWorker:
    """A running worker."""

    port: int
    channel: grpc.aio.Channel
    stop: asyncio.Event
    serving: "asyncio.Task[None]"
    children: list[EngineProcess]

    def __post_init__(self) -> None:
        self.stub = pb_grpc.WorkerServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    @property
    def engine_pid(self) -> int:
        pid = self.children[-1].process.pid
        assert pid is not None
        return pid

    def link(self) -> GatewayLink:
        return GatewayLink(self.stub)

    def signal_engine(self, number: signal.Signals) -> None:
        os.kill(self.engine_pid, number)

    async def load(self) -> pb.GetLoadResponse:
        return cast(pb.GetLoadResponse, await self.stub.GetLoad(pb.GetLoadRequest()))

    async def wait_health(self, status: int, service: str = "") -> None:
        """Watches until this status is told."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=service))
        async with asyncio.timeout(TIMEOUT_S):
            async for answer in watch:
                if answer.status == status:
                    break
        watch.cancel()

    async def wait_load(
        self, predicate: Callable[[pb.GetLoadResponse], bool], *, timeout_s: float = 5
    ) -> None:
        """Asks until the load is so."""
        async with asyncio.timeout(timeout_s):
            # The load is another process's: nothing here could be awaited.
            while not predicate(await self.load()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def assert_clean(self) -> None:
        """Nothing runs, nothing waits, every page is free or cached."""
        await self.wait_load(is_clean)

    async def assert_next_works(self) -> None:
        """A new request on a new stream is echoed to its end."""
        link = self.link()
        await link.submit(1, [5, 6, 7], request_id="the next one")
        outcome = await link.outcome(1)
        assert outcome.token_ids == [5, 6, 7]
        assert outcome.reason == pb.FINISH_REASON_EOS
        link.call.cancel()


def is_clean(load: pb.GetLoadResponse) -> bool:
    return (
        load.ready
        and load.running == load.waiting == load.pages_held == 0
        and load.pages_free + load.pages_cached == load.pages_total > 0
    )


def neutral_sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"top_p": 1.0, "repetition_penalty": 1.0, **fields})


@asynccontextmanager
async def running_worker(
    folder: Path,
    *,
    target: Callable[..., None] = run_engine,
    wait_serving: bool = True,
    tracer: Tracer | None = None,
    **settings: Any,
) -> AsyncIterator[FrontWorker]:
    """Runs `serve` on this loop, over the tokenizer in `folder`, with `target` as its engine."""
    values: dict[str, Any] = {
        "engine": "echo",
        "max_running": 4,
        "max_waiting": 4,
        "max_context": 128,
    }
    values |= {"listen": "127.0.0.1:0", "drain_grace_s": 0.0, "model": str(folder)}
    config = resolve(WorkerConfig(**{**values, **settings}))
    children: list[EngineProcess] = []

    def spawn() -> EngineProcess:
        children.append(EngineProcess(target, (config, os.getpid())))
        return children[-1]

    stop = asyncio.Event()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        first = spawn()
        serving = tasks.create_task(
            serve(config, first, spawn, stop, tracer=tracer, on_listening=listening.set_result)
        )
        port = await asyncio.wait_for(listening, TIMEOUT_S)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            worker = FrontWorker(port, channel, stop, serving, children)
            try:
                if wait_serving:
                    await worker.wait_health(SERVING)
                yield worker
            finally:
                # Else the server would grant the calls left open its whole grace.
                await channel.close()
                stop.set()
                await asyncio.wait((serving,), timeout=TIMEOUT_S)
    assert all(child.process.exitcode is not None for child in children)
