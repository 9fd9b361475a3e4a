"""Tokens in, text that may be shown out: detokenizer, stop matcher and their accounting."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gateway.detokenizer import Detokenizer
from gateway.stop import StopMatcher


# A tuple, as one is made for every token: a frozen dataclass takes twice as long.
class TextPiece(NamedTuple):
    """Text, never empty, and the tokens whose last character is in it."""

    text: str
    token_ids: list[int]


class TextStream:
    """The text of one completion; it dies with its request.

    Every token appears once: in a piece, or at the end in `unshown_token_ids`.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_matcher: StopMatcher | None, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_matcher = stop_matcher
        # A stop string that is complete before so many tokens is text like any other.
        self._min_tokens = min_tokens
        # Tokens up to and including the one that completed a stop string, if one did.
        self.num_tokens = 0
        self._unshown: list[int] = []
        # For each unshown token, how many characters must be out before it is shown.
        self._ends: list[int] = []
        self._num_chars = 0
        self._num_shown_chars = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; nothing is taken in after it."""
        return self._stop_matcher.matched if self._stop_matcher else None

    @property
    def unshown_token_ids(self) -> list[int]:
        """Tokens without text, or whose text is held back."""
        return list(self._unshown)

    def feed(self, token_ids: Sequence[int]) -> TextPiece | None:
        """What these tokens let out; tokens after a stop string are dropped."""
        if len(token_ids) == 1 and self._stop_matcher is None and not self._unshown:
            return self._feed_one(token_ids[0])
        shown: list[str] = []
        for token_id in token_ids:
            text = self._detokenizer.feed(token_id)
            self._num_chars += len(text)
            self._unshown.append(token_id)
            # A character begun here ends in a later token, and takes this one along.
            self._ends.append(self._num_chars + self._detokenizer.is_incomplete)
            self.num_tokens += 1
            if self._stop_matcher is not None:
                text = self._stop_matcher.feed(text, self.num_tokens >= self._min_tokens)
                if self._stop_matcher.matched is not None:
                    shown.append(text)
                    return self._last_piece(shown)
            shown.append(text)
        return self._piece("".join(shown))

    def finish(self) -> TextPiece | None:
        """What is left when no more tokens come. May complete a stop string."""
        text = self._detokenizer.flush()
        if self._stop_matcher is None:
            return self._last_piece([text])
        may_stop = self.num_tokens >= self._min_tokens
        return self._last_piece(
            [self._stop_matcher.feed(text, may_stop), self._stop_matcher.flush()]
        )

    def _feed_one(self, token_id: int) -> TextPiece | None:
        """As nearly always: nothing is held back, and nothing may have to be."""
        text = self._detokenizer.feed(token_id)
        self.num_tokens += 1
        if text and not self._detokenizer.is_incomplete:
            return TextPiece(text, [token_id])
        self._num_chars += len(text)
        self._unshown.append(token_id)
        self._ends.append(self._num_chars + self._detokenizer.is_incomplete)
        return self._piece(text)

    def _piece(self, text: str) -> TextPiece | None:
        if not text:
            return None
        self._num_shown_chars += len(text)
        if self._ends[-1] == self._num_shown_chars:
            # Nothing is held back, as for nearly every token.
            return self._take_all(text)
        count = bisect_right(self._ends, self._num_shown_chars)
        token_ids = self._unshown[:count]
        del self._unshown[:count], self._ends[:count]
        return TextPiece(text, token_ids)

    def _last_piece(self, shown: list[str]) -> TextPiece | None:
        text = "".join(shown)
        return self._take_all(text) if text else None

    def _take_all(self, text: str) -> TextPiece:
        token_ids, self._unshown, self._ends = self._unshown, [], []
        return TextPiece(text, token_ids)
