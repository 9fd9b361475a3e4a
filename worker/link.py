"""One gateway's Run stream: what lives on it and what it has still to be sent.

Everything here runs on the event loop. One sender writes; whatever comes while it waits
for a slow gateway is merged, so that the number of messages falls as the gateway falls
behind, and a gateway that is too far behind is let go.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shared.errors import QueueFullError, ServingError
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from worker.convert import (
    HANDLE_MASK,
    add_token_logprobs,
    fill_step_output,
    logprob_entry_bytes,
)
from worker.messages import Failed, Finished, Started, TokenLogprobs
from worker.step import BoolArray, Int32Array, Int64Array

_Array = TypeVar("_Array", Int32Array, Int64Array)
Write = Callable[[pb.RunResponse], Awaitable[None]]
# (public request id, index of the completion)
RequestKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """How far a gateway may be behind before it is let go."""

    # About 12 bytes each, so a few MB; at 256 tokens a step, 1024 steps.
    max_pending_tokens: int = 1 << 18
    # Answers to submits and pings; beyond these the link's commands are not read.
    max_pending_answers: int = 1024
    # As estimated; a prompt's entries with twenty likeliest tokens each are 170 bytes a token.
    max_pending_logprob_bytes: int = 128 << 20
    # No message gets more once it has this much, which is far from what gRPC lets through.
    max_message_logprob_bytes: int = 4 << 20


class Link:
    """State of one Run stream, from its opening to its end."""

    def __init__(self, link_id: int, limits: LinkLimits) -> None:
        self.link_id = link_id
        # The accepted requests without a terminal entry.
        self.live: dict[int, RequestKey] = {}
        # Those of them that the scheduler has not taken up yet.
        self.waiting: set[int] = set()
        self._limits = limits
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = asyncio.Event()
        self._error: ServingError | None = None
        self._is_closing = False
        self._is_half_closed = False
        self._answers: list[pb.RunResponse] = []
        self._load: pb.GetLoadResponse | None = None
        self._prefixes: pb.CachedPrefixes | None = None
        # Messages that are complete because they have log-probabilities enough.
        self._full: list[pb.RunResponse] = []
        # In those and in what is still collected.
        self._num_logprob_bytes = 0
        self._clear_output()

    def answer(self, response: pb.RunResponse) -> None:
        """Sends an answer to a command, before any output that comes later."""
        self._answers.append(response)
        if len(self._answers) >= self._limits.max_pending_answers:
            self._has_room.clear()
        self._wake.set()

    def report_load(self, response: pb.GetLoadResponse) -> None:
        """Sends the load; one that was not sent yet is superseded."""
        self._load = response
        self._wake.set()

    def report_prefixes(self, prefixes: pb.CachedPrefixes) -> None:
        """Sends what is cached; what was not sent yet is superseded."""
        self._prefixes = prefixes
        self._wake.set()

    def push_tokens(self, uids: Int64Array, token_ids: Int32Array, committed_at: float) -> None:
        """Sends tokens of this link's requests."""
        self._uids.append(uids)
        self._token_ids.append(token_ids)
        self._num_tokens += len(uids)
        self._note_commit(committed_at)
        if self._num_tokens > self._limits.max_pending_tokens:
            self.drop(
                QueueFullError(
                    f"this gateway is {self._num_tokens} tokens behind; "
                    f"at most {self._limits.max_pending_tokens} are kept"
                )
            )
        self._cut_message()

    def push_logprobs(self, logprobs: TokenLogprobs, mine: BoolArray, committed_at: float) -> None:
        """Sends those of its entries that are of this link's requests."""
        if logprobs.is_prompt:
            self._cut_message()
        add_token_logprobs(self._collected.output, logprobs, mine)
        num_bytes = int(mine.sum()) * logprob_entry_bytes(logprobs.top_ids.shape[1])
        self._message_logprob_bytes += num_bytes
        self._num_logprob_bytes += num_bytes
        self._note_commit(committed_at)
        if self._num_logprob_bytes > self._limits.max_pending_logprob_bytes:
            self.drop(
                QueueFullError(
                    f"this gateway is {self._num_logprob_bytes} bytes of log-probabilities behind; "
                    f"at most {self._limits.max_pending_logprob_bytes} are kept"
                )
            )

    def push_started(self, started: Started, committed_at: float) -> None:
        handle = started.uid & HANDLE_MASK
        if handle in self.live:
            self.waiting.discard(handle)
            self._started.append(started)
            self._note_commit(committed_at)

    def push_ended(self, ended: Finished | Failed, committed_at: float) -> RequestKey | None:
        """Sends a terminal entry; whose it is, or None if it had ended before."""
        key = self.forget(ended.uid & HANDLE_MASK)
        if key is not None:
            self._ended_entries.append(ended)
            self._note_commit(committed_at)
        return key

    def forget(self, handle: int) -> RequestKey | None:
        """Ends a request without a word; whose it is, or None if it had ended before."""
        self.waiting.discard(handle)
        key = self.live.pop(handle, None)
        if key is not None:
            self._wake.set()
        return key

    def half_close(self) -> None:
        """The gateway sends no more: the link ends well when its last request has."""
        self._is_half_closed = True
        self._wake.set()

    def close(self, error: ServingError | None) -> None:
        """Ends the link when what is pending has been sent."""
        self._error = self._error or error
        self._is_closing = True
        self._wake.set()

    def drop(self, error: ServingError | None) -> None:
        """Ends the link now, whatever is pending."""
        self._error = self._error or error
        self._ended.set()

    async def ended(self) -> None:
        """Returns when the link has ended well; raises the error that it ended with."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def has_room(self) -> None:
        """Returns when another command may be read."""
        await self._has_room.wait()

    async def send_all(self, write: Write) -> None:
        """Writes what comes until the link ends. There must be one sender alone."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._load is not None:
                load, self._load = self._load, None
                await write(pb.RunResponse(load=load))
            if self._prefixes is not None:
                prefixes, self._prefixes = self._prefixes, None
                await write(pb.RunResponse(prefixes=prefixes))
            # Until none is left: the output below may hold tokens of a request that was
            # accepted while an answer was being written.
            while self._answers:
                answers, self._answers = self._answers, []
                self._has_room.set()
                for answer in answers:
                    await write(answer)
            for output in self._take_outputs():
                await write(output)
            if self._is_done():
                self._ended.set()
                return

    def _is_done(self) -> bool:
        is_leaving = self._is_closing or (self._is_half_closed and not self.live)
        return is_leaving and not self._wake.is_set()

    def _take_outputs(self) -> list[pb.RunResponse]:
        outputs, self._full = self._full, []
        if self._num_tokens or self._started or self._ended_entries or self._message_logprob_bytes:
            outputs.append(self._take_collected())
        self._num_logprob_bytes = 0
        return outputs

    def _take_collected(self) -> pb.RunResponse:
        response = self._collected
        fill_step_output(
            response.output,
            handles=(_joined(self._uids) & HANDLE_MASK).tolist() if self._uids else [],
            token_ids=_joined(self._token_ids).tolist() if self._uids else [],
            started=self._started,
            ended=self._ended_entries,
            committed_at=self._committed_at,
        )
        self._clear_output()
        return response

    def _cut_message(self) -> None:
        """What comes from now on goes into another message, if this one has enough."""
        if self._message_logprob_bytes >= self._limits.max_message_logprob_bytes:
            self._full.append(self._take_collected())

    def _clear_output(self) -> None:
        self._uids: list[Int64Array] = []
        self._token_ids: list[Int32Array] = []
        self._num_tokens = 0
        self._started: list[Started] = []
        self._ended_entries: list[Finished | Failed] = []
        # Has the log-probabilities already.
        self._collected = pb.RunResponse()
        self._message_logprob_bytes = 0
        self._committed_at = 0.0

    def _note_commit(self, committed_at: float) -> None:
        # Of merged steps the oldest tells how far behind the reader is.
        self._committed_at = self._committed_at or committed_at
        self._wake.set()


def _joined(arrays: list[_Array]) -> _Array:
    """At least one array; nothing is copied when it is the only one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
