"""Log-probabilities on their way from a worker to a client, beside the tokens they are of.

They wait as plain arrays, 8 bytes for each token that is told: one with the twenty likeliest
beside it would else take some 3 KiB, and a slow reader has thousands waiting.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

# Quoted: before Python 3.12, arrays are generic for the type checker only.
_Integers: TypeAlias = "array[int]"
_Floats: TypeAlias = "array[float]"
# What a token id reads as.
TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token at one place."""

    token_id: int
    token_bytes: bytes
    logprob: float
    # 1 + the number of tokens that were likelier.
    rank: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Those of some tokens in a row."""

    token_ids: _Integers
    logprobs: _Floats
    ranks: _Integers
    # The `top_` arrays hold so many entries for each token, likeliest first.
    num_top: int
    top_token_ids: _Integers
    top_logprobs: _Floats
    token_bytes: TokenBytes

    def __len__(self) -> int:
        return len(self.token_ids)

    def places(self) -> Iterator[tuple[TokenLogprob, list[TokenLogprob]]]:
        """For each token itself, and the likeliest at its place."""
        chosen = zip(self.token_ids, self.logprobs, self.ranks, strict=True)
        for place, (token_id, logprob, rank) in enumerate(chosen):
            yield self._entry(token_id, logprob, rank), self._top(place)

    def _top(self, place: int) -> list[TokenLogprob]:
        begin, rank = place * self.num_top, 1
        top: list[TokenLogprob] = []
        for index in range(begin, begin + self.num_top):
            logprob = self.top_logprobs[index]
            if top and logprob < top[-1].logprob:
                rank = len(top) + 1
            top.append(self._entry(self.top_token_ids[index], logprob, rank))
        return top

    def _entry(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        return TokenLogprob(token_id, self.token_bytes(token_id), logprob, rank)


class LogprobsPart(Protocol):
    """A worker's message of some tokens in a row, which this module does not know otherwise."""

    @property
    def token_ids(self) -> Iterable[int]: ...
    @property
    def logprobs(self) -> Iterable[float]: ...
    @property
    def ranks(self) -> Iterable[int]: ...
    @property
    def num_top(self) -> int: ...
    @property
    def top_token_ids(self) -> Iterable[int]: ...
    @property
    def top_logprobs(self) -> Iterable[float]: ...


class LogprobsBuffer:
    """A queue of log-probabilities: in at one end by parts, out at the other by tokens."""

    __slots__ = ("_logprobs", "_num_top", "_ranks", "_token_ids", "_top_logprobs", "_top_token_ids")

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._logprobs = array("f")
        self._ranks = array("I")
        self._num_top = 0
        self._top_token_ids = array("I")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, part: LogprobsPart) -> None:
        """Every part of a request has the same number of likeliest tokens."""
        self._num_top = part.num_top
        self._token_ids.extend(part.token_ids)
        self._logprobs.extend(part.logprobs)
        self._ranks.extend(part.ranks)
        self._top_token_ids.extend(part.top_token_ids)
        self._top_logprobs.extend(part.top_logprobs)

    def take(self, count: int, token_bytes: TokenBytes) -> Logprobs:
        """The oldest `count`, which must be there."""
        num_top = count * self._num_top
        taken = Logprobs(
            token_ids=self._token_ids[:count],
            logprobs=self._logprobs[:count],
            ranks=self._ranks[:count],
            num_top=self._num_top,
            top_token_ids=self._top_token_ids[:num_top],
            top_logprobs=self._top_logprobs[:num_top],
            token_bytes=token_bytes,
        )
        del self._token_ids[:count], self._logprobs[:count], self._ranks[:count]
        del self._top_token_ids[:num_top], self._top_logprobs[:num_top]
        return taken
