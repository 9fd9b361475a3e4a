"""What comes back from a generation, as plain values."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class FinishReason(StrEnum):
    """Why a completion ended without an error."""

    # An eos token, a stop token or a stop string; Finished says which.
    STOP = "stop"
    # max_tokens, or the end of the context.
    LENGTH = "length"
    # Somebody called `abort`.
    ABORTED = "aborted"
    # time_limit_ms.
    TIME_LIMIT = "time_limit"
    # A reason that this client is too old to know.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely the model found it, before temperature and the like."""

    token_id: int
    # By itself; U+FFFD stands for a character of which it is only a part.
    text: str
    # The same, exactly.
    token_bytes: bytes
    logprob: float
    # 1 is the likeliest; equals have the same.
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One place of the sequence: the token there, and the likeliest ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one completion."""

    prompt_tokens: int
    # How many of them were found in the prefix cache.
    cached_tokens: int
    # The eos or stop token that ended the completion included.
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a completion's time went, as the servers measured it."""

    queue_ms: float
    prefill_ms: float
    time_to_first_token_ms: float
    decode_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Started:
    """The scheduler took the request up; once for each completion."""

    index: int
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    # How many requests waited ahead of this one when it arrived.
    queue_position: int
    # One for each prompt token but the first, where they were asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """More text: never empty, never half a character, never a part of a stop string."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    # One for each of token_ids, where they were asked for.
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a completion. At most one of the three matches is set."""

    index: int
    finish_reason: FinishReason
    eos_token_id: int | None
    stop_token_id: int | None
    stop_string: str | None
    usage: Usage
    timings: Timings
    # Repeats this completion when given as `seed`.
    seed: int
    # Tokens after the last Delta that have no text.
    trailing_token_ids: tuple[int, ...]
    # One for each of them, where they were asked for.
    trailing_logprobs: tuple[TokenLogprobs, ...]


Event: TypeAlias = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion."""

    request_id: str
    index: int
    text: str
    # Without the eos or stop token that ended it.
    token_ids: tuple[int, ...]
    # One for each of token_ids, where they were asked for.
    logprobs: tuple[TokenLogprobs, ...]
    # One for each prompt token but the first, where they were asked for; of several
    # completions, the first one has them.
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finished: Finished

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.finish_reason

    @property
    def usage(self) -> Usage:
        return self.finished.usage

    @property
    def timings(self) -> Timings:
        return self.finished.timings

    @property
    def seed(self) -> int:
        """Repeats this completion when given as `seed`."""
        return self.finished.seed
