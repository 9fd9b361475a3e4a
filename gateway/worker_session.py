"""One life of the stream to one worker: many requests over it, until it breaks.

Knows the worker's protobuf and nothing of text. One task reads, one writes (two writes at
once would end the call), one makes sure that the other side is alive.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import grpc
import structlog

from gateway.backoff import RETRY_AFTER_MS
from gateway.channel import RequestChannel, WorkerFinished, WorkerStarted
from gateway.coalescing import Coalescing, RemoteClock
from gateway.request import Submission
from shared.errors import Code, ServingError, UnavailableError, error_of
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.types import FinishReason, StructuredOutput, StructureKind

_log = structlog.get_logger(__name__)

_KINDS = {
    StructureKind.JSON_SCHEMA: pb.StructuredOutput.KIND_JSON_SCHEMA,
    StructureKind.JSON_OBJECT: pb.StructuredOutput.KIND_JSON_OBJECT,
    StructureKind.REGEX: pb.StructuredOutput.KIND_REGEX,
    StructureKind.GRAMMAR: pb.StructuredOutput.KIND_GRAMMAR,
    StructureKind.CHOICE: pb.StructuredOutput.KIND_CHOICE,
}

# Tokens wait for others at most twice as long.
_HOLD_S = 0.05

RunCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.RunRequest, pb.RunResponse]"


class WorkerSession:
    """Requests multiplexed over one Run call. Dies with it; the link then makes another."""

    def __init__(
        self,
        address: str,
        call: RunCall,
        *,
        ping_interval_s: float,
        silence_limit_s: float,
        on_load: Callable[[pb.GetLoadResponse], None],
        on_lag: Callable[[float], None],
        on_prefixes: Callable[[bytes], None],
        coalesces: bool,
    ) -> None:
        self._address = address
        self._call = call
        self._ping_interval_s = ping_interval_s
        self._silence_limit_s = silence_limit_s
        self._on_load = on_load
        # Seconds from a step's commit to its arrival here.
        self._on_lag = on_lag
        # What the worker has cached, as far as it tells.
        self._on_prefixes = on_prefixes
        self._coalescing = Coalescing(is_enabled=coalesces)
        self._clock = RemoteClock()
        self._last_ping = (0, 0.0)
        # By handle, the lists of tokens that wait for more: those that did so before the last
        # look, and the others. A channel has another list once its reader has taken this one.
        self._held_long: dict[int, list[int]] = {}
        self._held: dict[int, list[int]] = {}
        self._hold_timer: asyncio.TimerHandle | None = None
        self._channels: dict[int, RequestChannel] = {}
        self._last_handle = 0
        # Bounded by the requests that live: a submit and an abort for each.
        self._commands: deque[pb.RunRequest] = deque()
        self._has_commands = asyncio.Event()
        self._has_heard = False
        self.is_lost = False

    @property
    def num_live(self) -> int:
        return len(self._channels)

    async def run(self) -> None:
        """Carries requests until the stream breaks. Raises what broke it.

        Every request still on it then ends with UnavailableError.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read())
                tasks.create_task(self._write())
                tasks.create_task(self._keep_alive())
        finally:
            self.is_lost = True
            self._call.cancel()
            lost = _lost()
            for channel in self._channels.values():
                channel.finish(lost)
            self._channels.clear()
            if self._hold_timer is not None:
                self._hold_timer.cancel()

    def submit(self, submission: Submission) -> RequestChannel:
        """Sends a request; its answers come into the channel."""
        if self.is_lost:
            raise _lost()
        self._last_handle += 1
        channel = RequestChannel(self._last_handle, self._abort_with_reply)
        self._channels[channel.handle] = channel
        self._send(pb.RunRequest(submit=_submit(channel.handle, submission)))
        return channel

    def close(self, channel: RequestChannel) -> None:
        """The reader is gone: aborts the request unless it has ended. Idempotent."""
        if self._channels.pop(channel.handle, None) is not None:
            self._send_abort(channel.handle, reply=False)

    def _abort_with_reply(self, handle: int) -> None:
        if handle in self._channels:
            self._send_abort(handle, reply=True)

    def _send_abort(self, handle: int, *, reply: bool) -> None:
        self._send(pb.RunRequest(abort=pb.AbortHandles(handles=[handle], reply=reply)))

    def _send(self, command: pb.RunRequest) -> None:
        self._commands.append(command)
        self._has_commands.set()

    async def _write(self) -> None:
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            while self._commands:
                try:
                    await self._call.write(self._commands.popleft())
                except asyncio.InvalidStateError:
                    # The call has ended; the reader learns why.
                    return

    async def _keep_alive(self) -> None:
        """A dead worker breaks the stream at once; this finds one that hangs."""
        nonce = 0
        # Counted in pings, not by a clock: after a pause of this process, or of the whole
        # machine, the worker's answers may be here without having been read.
        silence_s = 0.0
        while True:
            nonce += 1
            self._last_ping = (nonce, time.time())
            self._send(pb.RunRequest(ping=pb.Ping(nonce=nonce)))
            self._has_heard = False
            await asyncio.sleep(self._ping_interval_s)
            silence_s = 0.0 if self._has_heard else silence_s + self._ping_interval_s
            if silence_s >= self._silence_limit_s:
                raise UnavailableError(
                    f"worker {self._address} has said nothing for {silence_s:.1f} s"
                )

    async def _read(self) -> None:
        while True:
            response = await self._call.read()
            # EOF is a value of its own type.
            if not isinstance(response, pb.RunResponse):
                raise UnavailableError(f"worker {self._address} closed the stream")
            self._has_heard = True
            self._take(response)

    def _take(self, response: pb.RunResponse) -> None:
        match response.WhichOneof("event"):
            case "output":
                self._take_output(response.output)
            case "rejected":
                failure = response.rejected.failure
                self._end(response.rejected.handle, _error(failure))
            case "load":
                self._on_load(response.load)
            case "prefixes":
                self._on_prefixes(response.prefixes.hashes)
            case "pong":
                self._take_pong(response.pong)
            case _:
                # An acceptance, whose queue position comes again with `started`, or what a
                # newer worker knows.
                pass

    def _take_pong(self, pong: pb.Pong) -> None:
        nonce, sent_at = self._last_ping
        # An older worker does not tell its time.
        if pong.unix_us and pong.nonce == nonce:
            told = 1e-6 * pong.unix_us
            self._clock.observe(sent_at=sent_at, told=told, received_at=time.time())

    def _take_output(self, output: pb.StepOutput) -> None:
        channels = self._channels
        for started in output.started:
            channel = channels.get(started.handle)
            if channel is not None:
                channel.started = WorkerStarted(
                    started.cached_tokens, started.queue_position, started.queue_ms
                )
                channel.notify()
        for part in output.logprobs:
            channel = channels.get(part.handle)
            if channel is not None:
                channel.add_logprobs(part, is_prompt=part.prompt)
        touched = self._take_tokens(output)
        for finished in output.finished:
            self._end(finished.handle, _finished(finished))
        for failed in output.failed:
            self._end(failed.handle, _error(failed.failure))
        if output.committed_unix_us:
            lag_s = self._clock.age_s(1e-6 * output.committed_unix_us)
            self._on_lag(lag_s)
            if output.token_ids:
                self._coalescing.observe(lag_s, len(output.token_ids))
        self._notify(touched)

    def _take_tokens(self, output: pb.StepOutput) -> dict[int, RequestChannel]:
        """Puts them into their channels, which are told after all else that came with them.

        Once for each token of every request. Handles that are not there belong to requests
        that were closed while the step was on its way.
        """
        channels, touched = self._channels, {}
        for handle, token_id in zip(output.handles, output.token_ids, strict=True):
            channel = channels.get(handle)
            if channel is not None:
                channel.token_ids.append(token_id)
                touched[handle] = channel
        return touched

    def _notify(self, touched: dict[int, RequestChannel]) -> None:
        least = self._coalescing.num_tokens
        if least == 1:
            for channel in touched.values():
                channel.notify()
            return
        held = self._held
        for handle, channel in touched.items():
            if channel.end is None and channel.is_flowing and len(channel.token_ids) < least:
                held[handle] = channel.token_ids
            else:
                channel.notify()
        if held and self._hold_timer is None:
            self._hold_timer = asyncio.get_running_loop().call_later(_HOLD_S, self._let_go)

    def _let_go(self) -> None:
        """Tokens that no others follow, as their request or the engine pauses, wait no longer."""
        held, self._held_long, self._held = self._held_long, self._held, {}
        for handle, token_ids in held.items():
            channel = self._channels.get(handle)
            if channel is not None and channel.token_ids is token_ids:
                channel.notify()
        self._hold_timer = (
            asyncio.get_running_loop().call_later(_HOLD_S, self._let_go)
            if self._held_long
            else None
        )

    def _end(self, handle: int, end: WorkerFinished | ServingError) -> None:
        channel = self._channels.pop(handle, None)
        if channel is not None:
            channel.finish(end)


def _lost() -> UnavailableError:
    """For clients, who have no business with the worker's address."""
    return UnavailableError("the worker was lost", retry_after_ms=RETRY_AFTER_MS)


def _submit(handle: int, submission: Submission) -> pb.Submit:
    sampling, structure = submission.sampling, submission.structured_output
    return pb.Submit(
        handle=handle,
        request_id=submission.request_id,
        index=submission.index,
        prompt_token_ids=submission.prompt_token_ids,
        max_tokens=submission.max_tokens,
        sampling=pb.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=sampling.allowed_token_ids,
        ),
        stop_token_ids=submission.stop_token_ids,
        ignore_eos=submission.ignore_eos,
        min_tokens=submission.min_tokens,
        logprobs=submission.logprobs,
        prompt_logprobs=submission.prompt_logprobs,
        structured_output=None if structure is None else _structured_output(structure),
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        time_limit_ms=submission.time_limit_ms,
        timeout_ms=submission.timeout_ms,
        traceparent=submission.traceparent,
        client=submission.client,
    )


def _structured_output(structure: StructuredOutput) -> pb.StructuredOutput:
    return pb.StructuredOutput(
        kind=_KINDS[structure.kind], text=structure.text, choices=structure.choices
    )


def _finished(finished: pb.RequestFinished) -> WorkerFinished | ServingError:
    try:
        reason = FinishReason(finished.reason)
    except ValueError:
        return ServingError(f"the worker ended the request for reason {finished.reason}")
    return WorkerFinished(
        reason=reason,
        matched_token_id=finished.matched_token_id,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
        queue_ms=finished.queue_ms,
        prefill_ms=finished.prefill_ms,
        decode_ms=finished.decode_ms,
    )


def _error(failure: pb.Failure) -> ServingError:
    code = failure.code if failure.code in set(Code) else Code.INTERNAL
    return error_of(
        code, failure.message, field=failure.field, retry_after_ms=failure.retry_after_ms
    )
