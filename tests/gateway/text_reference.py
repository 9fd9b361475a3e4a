"""What a whole sequence of tokens comes to, worked out at once and in the plainest way."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Ending:
    """Where the first stop string that counts is complete: after so many tokens and characters."""

    num_tokens: int
    num_chars: int
    stop_string: str


@dataclass(frozen=True)
class WholeText:
    """The text of some tokens, each given by its bytes."""

    pieces: Sequence[bytes]

    @cached_property
    def text(self) -> str:
        return b"".join(self.pieces).decode(errors="replace")

    def after(self, num_tokens: int) -> str:
        """The characters that so many tokens have completed."""
        return self._texts[num_tokens]

    def end_of(self, num_tokens: int) -> int:
        """How many characters hold the last of so many tokens, and all before it."""
        text = b"".join(self.pieces[:num_tokens]).decode(errors="replace")
        return len(text)

    def ending(self, stop_strings: Sequence[str], min_tokens: int = 0) -> Ending | None:
        """The first stop string to be complete once there are `min_tokens`; of two, the longer."""
        begin = 0
        for num_tokens in range(1, len(self.pieces) + 1):
            text = self.after(num_tokens)
            if num_tokens == len(self.pieces):
                # What was left of a character is told with the last token.
                text = self.text
            if num_tokens >= min_tokens:
                for end in range(begin + 1, len(text) + 1):
                    matches = [stop for stop in stop_strings if text[:end].endswith(stop)]
                    if matches:
                        return Ending(num_tokens, end, max(matches, key=len))
            begin = len(text)
        return None

    @cached_property
    def _texts(self) -> list[str]:
        return [
            complete_text(b"".join(self.pieces[:count])) for count in range(len(self.pieces) + 1)
        ]


def complete_text(data: bytes) -> str:
    """The text of some bytes without a character that is begun at their end."""
    for size in (1, 2, 3):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-size].decode(errors="replace")
    return data.decode(errors="replace")


def held_back(text: str, stop_strings: Sequence[str]) -> str:
    """The longest end of a text that some stop string begins with, and is not all of."""
    beginnings = {stop[:size] for stop in stop_strings for size in range(1, len(stop))}
    ends = [beginning for beginning in beginnings if text.endswith(beginning)]
    return max(ends, key=len, default="")
