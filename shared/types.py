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


class StructureKind(IntEnum):
    """What a structured output's rule is written in."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    GRAMMAR = 4
    CHOICE = 5


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The rule that a completion must obey: a text, or for CHOICE the choices."""

    kind: StructureKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens; every default is resolved.

    top_k 0 keeps all tokens; top_p 1, min_p 0, penalties 1 / 0 / 0, no bias and no allowed
    ids change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    # (token id, what is added to its logit); no id twice.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Not empty: nothing else can be sampled. No id twice.
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is an argmax, whatever the temperature and the filters say."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether the draw, greedy or not, is from other logits than the model's."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or bool(self.logit_bias)
            or bool(self.allowed_token_ids)
        )
