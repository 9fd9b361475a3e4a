"""How one completion goes on: from a worker's answers to the events that a client sees."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gateway.channel import RequestChannel, WorkerFinished, WorkerStarted
from gateway.logprobs import Logprobs, LogprobsBuffer, TokenBytes
from gateway.request import OutputOptions
from gateway.text_stream import TextPiece, TextStream
from shared.errors import ServingError, UnavailableError
from shared.types import FinishReason


@dataclass(frozen=True, slots=True)
class Started:
    """The scheduler took the request up."""

    index: int
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    queue_position: int
    # None: not asked for.
    prompt_logprobs: Logprobs | None


# A tuple, as one is made for every message: a frozen dataclass takes three times as long.
class Delta(NamedTuple):
    """More text, never empty."""

    # In place of tuple.index, which nobody calls on one.
    index: int  # type: ignore[assignment]
    text: str
    token_ids: list[int]
    # One to one with the tokens; None: not asked for.
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Timings:
    """As the public contract defines them, in milliseconds."""

    queue_ms: float
    prefill_ms: float
    time_to_first_token_ms: float
    decode_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The end, without an error."""

    index: int
    reason: FinishReason
    # Of the eos or stop token; meaningful for those reasons only.
    matched_token_id: int
    stop_string: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    seed: int
    trailing_token_ids: list[int]
    trailing_logprobs: Logprobs | None


Event = Started | Delta | Finished

# Of a request that ended before a worker took it up.
_NOT_STARTED = WorkerStarted(cached_tokens=0, queue_position=0, queue_ms=0.0)


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """What does not change while a completion goes on."""

    request_id: str
    # Which of the request's completions.
    index: int
    num_prompt_tokens: int
    seed: int
    # time.monotonic()
    arrived_at: float
    max_delta_tokens: int
    output: OutputOptions
    token_bytes: TokenBytes


class Completion:
    """The state of one completion, whichever worker serves it."""

    def __init__(
        self,
        params: CompletionParams,
        text: TextStream,
        on_first_token: Callable[[], None] | None = None,
    ) -> None:
        self._params = params
        self._index = params.index
        self._text = text
        self._on_first_token = on_first_token
        self._max_delta_tokens = params.max_delta_tokens
        self._tells_logprobs = params.output.logprobs is not None
        if params.output.logprobs is not None:
            # So that a delta stays as large, counted in what it tells.
            per_token = params.output.logprobs + 1
            self._max_delta_tokens = max(1, params.max_delta_tokens // per_token)
        # Those of the tokens that are not shown yet, in the channel of the worker that
        # sent the tokens.
        self._logprobs: LogprobsBuffer | None = None
        self._started: WorkerStarted | None = None
        self._has_told_start = False
        self._started_at = params.arrived_at
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._num_shown_tokens = 0
        self.has_tokens = False
        self.is_finished = False
        # By whichever gateway the Abort call came.
        self.was_aborted = False

    def absorb(self, channel: RequestChannel) -> Iterator[Event]:
        """The events that what waits in the channel makes; a batch of tokens is one Delta.

        Raises the worker's error after the tokens that came before it.
        """
        if channel.started is not self._started or not self._has_told_start:
            yield from self._start(channel)
        if channel.token_ids:
            delta = self.take_delta(channel)
            if delta is not None:
                yield delta
        if self.has_stopped:
            yield self._stopped()
        elif channel.end is not None and not channel.token_ids:
            yield from self._end(channel.end)

    @property
    def is_flowing(self) -> bool:
        """Whether all that may come now are tokens, and the end."""
        return self.has_tokens and not self.has_stopped and not self.is_finished

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has come, after which no token is taken."""
        return self._text.stop_string is not None

    def take_delta(self, channel: RequestChannel) -> Delta | None:
        """What the tokens that wait let out, as one Delta; there must be some."""
        token_ids = channel.take_tokens(self._max_delta_tokens)
        self._last_token_at = time.monotonic()
        if not self.has_tokens:
            self._take_first_token(channel)
        piece = self._text.feed(token_ids)
        return None if piece is None else self._delta(piece)

    def aborted_early(self) -> Iterator[Event]:
        """The events of a request that ended without a word from a worker."""
        if not self._has_told_start:
            yield self._told_start(self._started or _NOT_STARTED, None)
        self.is_finished = True
        yield self._finished(WorkerFinished(FinishReason.ABORTED, 0, 0, 0, 0.0, 0.0, 0.0))

    def _start(self, channel: RequestChannel) -> Iterator[Started]:
        started = channel.started
        if started is not None and started is not self._started:
            # Told once, but the usage is that of the worker which serves it in the end.
            self._started = started
            self._started_at = time.monotonic()
        if self._has_told_start:
            return
        if started is None:
            # A request that ended in the queue was never started; its client still
            # hears of its admission before its end.
            if isinstance(channel.end, WorkerFinished):
                yield self._told_start(_NOT_STARTED, None)
            return
        if self._params.output.prompt_logprobs is None:
            yield self._told_start(started, None)
        elif (logprobs := self._prompt_logprobs(channel)) is not None:
            yield self._told_start(started, logprobs)

    def _told_start(self, started: WorkerStarted, logprobs: Logprobs | None) -> Started:
        self._has_told_start = True
        return Started(
            self._index,
            self._params.request_id,
            self._params.num_prompt_tokens,
            started.cached_tokens,
            started.queue_position,
            logprobs,
        )

    def _prompt_logprobs(self, channel: RequestChannel) -> Logprobs | None:
        """None: not all of them are there, and they may still come."""
        waiting = channel.prompt_logprobs or LogprobsBuffer()
        num_missing = self._params.num_prompt_tokens - 1 - len(waiting)
        if num_missing:
            if channel.token_ids:
                raise ServingError(f"the worker left out {num_missing} prompt logprobs")
            # What ended amid its prompt has some of them.
            if not isinstance(channel.end, WorkerFinished):
                return None
        return waiting.take(len(waiting), self._params.token_bytes)

    def _take_first_token(self, channel: RequestChannel) -> None:
        self.has_tokens = channel.is_flowing = True
        self._first_token_at = self._last_token_at
        # From here on, no other worker is tried.
        self._logprobs = channel.logprobs
        if self._on_first_token is not None:
            self._on_first_token()

    def _delta(self, piece: TextPiece) -> Delta:
        text, token_ids = piece
        self._num_shown_tokens += len(token_ids)
        logprobs = self._take_logprobs(len(token_ids)) if self._tells_logprobs else None
        return Delta(self._index, text, token_ids, logprobs)

    def _take_logprobs(self, num_tokens: int) -> Logprobs:
        waiting = self._logprobs or LogprobsBuffer()
        if len(waiting) < num_tokens:
            raise ServingError(f"the worker sent {num_tokens} tokens with {len(waiting)} logprobs")
        return waiting.take(num_tokens, self._params.token_bytes)

    def _end(self, end: WorkerFinished | ServingError) -> Iterator[Event]:
        if isinstance(end, ServingError):
            raise self._explained(end)
        piece = self._text.finish()
        if piece is not None:
            yield self._delta(piece)
        # What was left of the text may have completed a stop string.
        yield self._stopped() if self._text.stop_string is not None else self._finished(end)

    def _stopped(self) -> Finished:
        """The text ended here, whatever the worker has sampled beyond."""
        started = self._started or _NOT_STARTED
        return self._finished(
            WorkerFinished(
                reason=FinishReason.STOP_STRING,
                matched_token_id=0,
                cached_tokens=started.cached_tokens,
                completion_tokens=self._text.num_tokens,
                queue_ms=started.queue_ms,
                prefill_ms=1e3 * (self._first_token_at - self._started_at),
                decode_ms=1e3 * (self._last_token_at - self._first_token_at),
            )
        )

    def _finished(self, end: WorkerFinished) -> Finished:
        self.is_finished = True
        self.was_aborted = end.reason is FinishReason.ABORTED
        now = time.monotonic()
        # A completion may end with its first token, which is then not among the tokens.
        first_token_at = self._first_token_at if self.has_tokens else now
        arrived_at, trailing = self._params.arrived_at, self._text.unshown_token_ids
        return Finished(
            index=self._index,
            reason=end.reason,
            matched_token_id=end.matched_token_id,
            stop_string=self._text.stop_string or "",
            prompt_tokens=self._params.num_prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            timings=Timings(
                queue_ms=end.queue_ms,
                prefill_ms=end.prefill_ms,
                time_to_first_token_ms=(
                    1e3 * (first_token_at - arrived_at) if end.completion_tokens else 0.0
                ),
                decode_ms=end.decode_ms,
                total_ms=1e3 * (now - arrived_at),
            ),
            seed=self._params.seed,
            trailing_token_ids=trailing,
            trailing_logprobs=self._take_logprobs(len(trailing)) if self._tells_logprobs else None,
        )

    def _explained(self, error: ServingError) -> ServingError:
        if not (self.has_tokens and isinstance(error, UnavailableError)):
            return error
        return UnavailableError(f"{error.message} after {self._num_shown_tokens} tokens")
