"""Token ids to text as they come, one object for each request.

The text of all pieces together is what decoding all bytes at once would give. No piece
ends inside a character.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.vocabulary import TokenTable

# Tokens that WindowDetokenizer holds back at most: longer than any character, and short
# enough that decoding them again for each token stays cheap.
_MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """Text of one token sequence."""

    @property
    def is_incomplete(self) -> bool:
        """Whether a character is begun and not ended."""
        ...

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; often none, or several."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        ...


class ByteDetokenizer:
    """A table look-up and an incremental UTF-8 decoder: constant time for each token.

    Invalid bytes become U+FFFD, one for each maximal part of a character (Unicode 15,
    section 3.9), wherever the borders between tokens fall.
    """

    __slots__ = ("_decoder", "_pieces", "_texts", "is_incomplete")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._pieces = table.visible_pieces if skip_special_tokens else table.pieces
        self._texts = table.visible_texts if skip_special_tokens else table.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_incomplete = False

    def feed(self, token_id: int) -> str:
        if not self.is_incomplete:
            # Most tokens are whole characters and need no decoder.
            text = self._texts[token_id]
            if text is not None:
                return text
        text = self._decoder.decode(self._pieces[token_id])
        self.is_incomplete = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.is_incomplete = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For decoders that are not a table: decodes the last few tokens anew for each one.

    A token's text is what it adds to the text of the few before it. Right for decoders
    that never change text they have given; slower than ByteDetokenizer, but bounded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []

    @property
    def is_incomplete(self) -> bool:
        return bool(self._held)

    def feed(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._new_text() if self._held else ""
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _advance(self) -> None:
        if self._held:
            self._context = (self._context + self._held)[-_MAX_HELD_TOKENS:]
            self._held = []
