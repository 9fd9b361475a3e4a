"""Token ids to text as they come, one object for each request.

The text of all pieces together is what decoding all bytes at once would give. No piece
ends inside a character.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gateway.vocabulary import TokenTable

# That WindowDetokenizer keeps at least, and not twice as many: longer than any character, and
# short enough that decoding them again for each token stays cheap.
_CONTEXT_TOKENS = 16


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

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_silent: Callable[[int], bool],
        fallback_bytes: Mapping[int, int],
    ) -> None:
        """`is_silent` tells the tokens that are not decoded at all.

        `fallback_bytes` are those of tokens that the decoder joins to characters, or else
        gives up together; empty: it replaces what is invalid, and nothing beside it.
        """
        self._decode = decode
        self._is_silent = is_silent
        self._byte_run = _ByteRun(fallback_bytes) if fallback_bytes else None
        self._context: list[int] = []
        # Of the context's text.
        self._num_shown_chars = 0
        self._ends_in_doubt = False

    @property
    def is_incomplete(self) -> bool:
        return self._ends_in_doubt or (self._byte_run is not None and self._byte_run.is_incomplete)

    def feed(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        return self._advance(
            [token_id] if self._byte_run is None else self._byte_run.feed(token_id)
        )

    def flush(self) -> str:
        return self._advance(self._byte_run.flush() if self._byte_run else [], is_last=True)

    def _advance(self, token_ids: list[int], *, is_last: bool = False) -> str:
        if not token_ids and not (is_last and self._ends_in_doubt):
            return ""
        self._context += token_ids
        text = self._decode(self._context)
        # Either a real one or a character that is not whole yet; the next token tells. No
        # other can change: what is left of one character is one U+FFFD.
        self._ends_in_doubt = self._byte_run is None and not is_last and text.endswith("\ufffd")
        end = len(text) - self._ends_in_doubt
        new_text = text[self._num_shown_chars : end]
        self._num_shown_chars = end
        if len(self._context) >= 2 * _CONTEXT_TOKENS:
            self._forget()
        return new_text

    def _forget(self) -> None:
        begin = len(self._context) - _CONTEXT_TOKENS
        while self._byte_run is not None and self._byte_run.goes_on_at(self._context[begin]):
            begin -= 1
        del self._context[:begin]
        self._num_shown_chars = len(self._decode(self._context)) - self._ends_in_doubt


class _ByteRun:
    """Makes valid UTF-8 of the tokens for single bytes.

    One invalid byte makes the tokenizers library give up all bytes beside it, so it gets
    none to see: where bytes are invalid, those of U+FFFD take their place.
    """

    def __init__(self, byte_of: Mapping[int, int]) -> None:
        self._byte_of = byte_of
        self._token_of = {byte: token_id for token_id, byte in byte_of.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_incomplete(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def feed(self, token_id: int) -> list[int]:
        """The tokens that now are whole characters, in place of this and those held back."""
        byte = self._byte_of.get(token_id)
        if byte is None:
            return [*self.flush(), token_id]
        return self._spelled(self._decoder.decode(bytes([byte])))

    def flush(self) -> list[int]:
        return self._spelled(self._decoder.decode(b"", True))

    def goes_on_at(self, token_id: int) -> bool:
        """Whether the token's character began before it."""
        return self._byte_of.get(token_id, 0) & 0xC0 == 0x80

    def _spelled(self, text: str) -> list[int]:
        return [self._token_of[byte] for byte in text.encode()]
