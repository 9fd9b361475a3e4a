"""Values that both services speak of. Standard library only."""

from dataclasses import dataclass
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a request ended without an error."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    ABORTED = 4
    TIME_LIMIT = 5
    STOP_STRING = 6  # only the gateway, which has the text, can find this one


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens; every default is resolved.

    top_k 0 keeps all tokens; top_p 1, min_p 0, penalties 1 / 0 / 0 change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is an argmax, whatever the other fields say."""
        return self.temperature == 0.0 or self.top_k == 1
