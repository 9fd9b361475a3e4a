"""How one completion goes on: from a worker's answers to the events that a client sees."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.channel import RequestChannel, WorkerFinished, WorkerStarted
from gateway.text_stream import TextPiece, TextStream
from shared.errors import ServingError, UnavailableError
from shared.types import FinishReason


@dataclass(frozen=True, slots=True)
class Started:
    """The scheduler took the request up."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    queue_position: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More text, never empty."""

    text: str
    token_ids: list[int]


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


Event = Started | Delta | Finished


class Completion:
    """The state of one completion, whichever worker serves it."""

    def __init__(
        self,
        request_id: str,
        *,
        text: TextStream,
        num_prompt_tokens: int,
        seed: int,
        arrived_at: float,
        max_delta_tokens: int,
    ) -> None:
        self._request_id = request_id
        self._text = text
        self._num_prompt_tokens = num_prompt_tokens
        self._seed = seed
        self._arrived_at = arrived_at
        self._max_delta_tokens = max_delta_tokens
        self._started: WorkerStarted | None = None
        self._started_at = arrived_at
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._num_shown_tokens = 0
        self.has_tokens = False
        self.is_finished = False

    def absorb(self, channel: RequestChannel) -> Iterator[Event]:
        """The events that what waits in the channel makes; a batch of tokens is one Delta.

        Raises the worker's error after the tokens that came before it.
        """
        if channel.started is not None and channel.started is not self._started:
            is_first = self._started is None
            started = self._start(channel.started)
            # Told once, but the usage is that of the worker which serves it in the end.
            if is_first:
                yield started
        elif self._started is None and isinstance(channel.end, WorkerFinished):
            # A request that ended in the queue was never started; its client still
            # hears of its admission before its end.
            yield self._start(WorkerStarted(0, 0, 0.0))
        token_ids = channel.take_tokens(self._max_delta_tokens)
        if token_ids:
            self._last_token_at = time.monotonic()
            if not self.has_tokens:
                self.has_tokens = True
                self._first_token_at = self._last_token_at
            piece = self._text.feed(token_ids)
            if piece is not None:
                yield self._delta(piece)
            if self._text.stop_string is not None:
                yield self._stopped()
                return
        if channel.end is not None and not channel.token_ids:
            yield from self._end(channel.end)

    def aborted_early(self) -> Iterator[Event]:
        """The events of a request that ended without a word from a worker."""
        if self._started is None:
            yield self._start(WorkerStarted(0, 0, 0.0))
        self.is_finished = True
        yield self._finished(WorkerFinished(FinishReason.ABORTED, 0, 0, 0, 0.0, 0.0, 0.0))

    def _start(self, started: WorkerStarted) -> Started:
        self._started = started
        self._started_at = time.monotonic()
        return Started(
            self._request_id,
            self._num_prompt_tokens,
            started.cached_tokens,
            started.queue_position,
        )

    def _delta(self, piece: TextPiece) -> Delta:
        self._num_shown_tokens += len(piece.token_ids)
        return Delta(piece.text, piece.token_ids)

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
        started = self._started or WorkerStarted(0, 0, 0.0)
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
        now = time.monotonic()
        # A completion may end with its first token, which is then not among the tokens.
        first_token_at = self._first_token_at if self.has_tokens else now
        return Finished(
            reason=end.reason,
            matched_token_id=end.matched_token_id,
            stop_string=self._text.stop_string or "",
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
            timings=Timings(
                queue_ms=end.queue_ms,
                prefill_ms=end.prefill_ms,
                time_to_first_token_ms=(
                    1e3 * (first_token_at - self._arrived_at) if end.completion_tokens else 0.0
                ),
                decode_ms=end.decode_ms,
                total_ms=1e3 * (now - self._arrived_at),
            ),
            seed=self._seed,
            trailing_token_ids=self._text.unshown_token_ids,
        )

    def _explained(self, error: ServingError) -> ServingError:
        if not (self.has_tokens and isinstance(error, UnavailableError)):
            return error
        return UnavailableError(f"{error.message} after {self._num_shown_tokens} tokens")
