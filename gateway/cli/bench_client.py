"""Streaming clients of a benchmark, in a process of their own.

A Python client costs 20 to 45 µs a message, so the parent starts several of these. Each
keeps the raw messages with their times and parses them when the run is over.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import grpc
import numpy as np
import uvloop
from numpy.typing import NDArray

from shared.auth import bearer_metadata
from shared.grpc_options import channel_options
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.tls import ClientTls, open_channel
from shared.workload import WorkloadRequest

# Quoted, because it is generic for the type checker only. Answers stay raw bytes.
_Call: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes]"

_PROGRESS_S = 0.25
_WARM_UP_TOKENS = 16
_GENERATE = "/tandem.v1.InferenceService/GenerateStream"


@dataclass(frozen=True, slots=True)
class ClientTask:
    """What one process does: each of its clients sends its requests one after the other."""

    address: str
    token: str
    tls: ClientTls | None
    clients: Sequence[Sequence[WorkloadRequest]]
    num_connections: int
    # For each call, from the start of the run.
    timeout_s: float
    # Keeps the prompts apart from those of earlier runs in the prefix cache.
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Every connection is up."""


@dataclass(frozen=True, slots=True)
class Go:
    """The parent's only word."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of this process so far: messages, and clients that have had a token."""

    num_messages: int
    num_flowing: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the clients of one process saw; times are time.monotonic()'s."""

    begin: float
    end: float
    num_tokens: int
    num_deltas: int
    ttft_s: NDArray[np.float64]
    # Between messages with text that follow each other in a stream.
    itl_s: NDArray[np.float64]
    # Status and words of each request that failed.
    failures: Sequence[str]


Report = Ready | Progress | Result


def run_clients(task: ClientTask, connection: Connection) -> None:
    """The process's whole life; a parent that is gone ends it."""
    # Ctrl-C is the parent's to hear, which then ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uvloop.run(_Clients(task, connection).run())
    except* (EOFError, BrokenPipeError, ConnectionResetError):
        pass


@dataclass(slots=True)
class _Stream:
    """One request: what came, when, and how it failed if it did."""

    sent_at: float
    times: list[float]
    messages: list[bytes]
    failure: str = ""


class _Clients:
    def __init__(self, task: ClientTask, connection: Connection) -> None:
        self._task = task
        self._connection = connection
        self._metadata = bearer_metadata(task.token)
        self._streams: list[_Stream] = []
        self._deadline = 0.0

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    open_channel(
                        self._task.address, self._task.tls, channel_options(own_connection=True)
                    )
                )
                for _ in range(self._task.num_connections)
            ]
            calls: list[_Call] = [
                channel.unary_stream(_GENERATE, request_serializer=_serialize)
                for channel in channels
            ]
            self._deadline = time.monotonic() + self._task.timeout_s
            await asyncio.gather(*(self._warm_up(call) for call in calls))
            self._connection.send(Ready())
            await asyncio.to_thread(self._connection.recv)
            begin = time.monotonic()
            self._deadline = begin + self._task.timeout_s
            self._streams.clear()
            async with asyncio.TaskGroup() as tasks:
                # It raises when the parent is gone, which ends the clients too.
                telling = tasks.create_task(self._tell_progress())
                clients = (
                    self._client(calls[i % len(calls)], requests)
                    for i, requests in enumerate(self._task.clients)
                )
                await asyncio.gather(*clients)
                telling.cancel()
            end = time.monotonic()
        self._connection.send(_result(begin, end, self._streams))

    async def _warm_up(self, call: _Call) -> None:
        """One short request of another prompt; its failure shows in the run."""
        first = self._task.clients[0][0]
        prompt = [token_id + 1 for token_id in first.prompt_token_ids]
        await self._send(
            call, WorkloadRequest(prompt, _WARM_UP_TOKENS, first.temperature, first.seed)
        )

    async def _client(self, call: _Call, requests: Sequence[WorkloadRequest]) -> None:
        for request in requests:
            await self._send(call, request)

    async def _send(self, call: _Call, request: WorkloadRequest) -> None:
        message = _to_proto(request, self._task.cache_salt)
        sent_at = time.monotonic()
        stream = _Stream(sent_at, [], [])
        self._streams.append(stream)
        times, messages = stream.times, stream.messages
        timeout_s = max(0.0, self._deadline - sent_at)
        try:
            async for raw in call(message, timeout=timeout_s, metadata=self._metadata):
                times.append(time.monotonic())
                messages.append(raw)
        except grpc.aio.AioRpcError as error:
            stream.failure = f"{error.code().name}: {error.details()}"

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            num_messages = sum(len(stream.messages) for stream in self._streams)
            # The first message says that it was admitted.
            num_flowing = sum(len(stream.messages) > 1 for stream in self._streams)
            self._connection.send(Progress(num_messages, num_flowing))


def _serialize(request: pb.GenerateRequest) -> bytes:
    return request.SerializeToString()


def _to_proto(request: WorkloadRequest, cache_salt: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=request.prompt_token_ids),
        max_tokens=request.max_tokens,
        sampling=pb.SamplingParams(temperature=request.temperature, seed=request.seed),
        stopping=pb.StopConditions(ignore_eos=True),
        cache_salt=cache_salt,
    )


def _result(begin: float, end: float, streams: Sequence[_Stream]) -> Result:
    num_tokens = num_deltas = 0
    ttft_s: list[float] = []
    itl_s: list[NDArray[np.float64]] = []
    failures = [stream.failure for stream in streams if stream.failure]
    for stream in streams:
        delta_times = []
        for at, raw in zip(stream.times, stream.messages, strict=True):
            event = pb.GenerateStreamResponse.FromString(raw)
            if event.HasField("delta"):
                delta_times.append(at)
                num_tokens += len(event.delta.token_ids)
            elif event.HasField("finished"):
                num_tokens += len(event.finished.trailing_token_ids)
        num_deltas += len(delta_times)
        if delta_times:
            ttft_s.append(delta_times[0] - stream.sent_at)
            itl_s.append(np.diff(delta_times))
    return Result(
        begin=begin,
        end=end,
        num_tokens=num_tokens,
        num_deltas=num_deltas,
        ttft_s=np.array(ttft_s),
        itl_s=np.concatenate(itl_s) if itl_s else np.empty(0),
        failures=failures,
    )
