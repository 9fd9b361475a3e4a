"""What the engine loop needs of a grammar library, so that only one module knows which it is."""

from collections.abc import Sequence
from typing import Protocol

from shared.types import StructuredOutput
from worker.step import Int32Array


class Matcher(Protocol):
    """Follows one completion through its rule. Not to be used by two threads at once."""

    def accept(self, token_id: int) -> bool:
        """Goes on by a token that the last mask allowed; False: it has a fault now."""
        ...

    def fault(self) -> tuple[str, bool] | None:
        """What went wrong, after which the masks mean nothing; and whether the rule is to
        blame, because following it takes too much."""
        ...


class CompiledRule(Protocol):
    """A rule that any number of completions may follow."""

    @property
    def num_bytes(self) -> int:
        """About what it occupied at most when it was compiled; following it may add to that."""
        ...

    def matcher(self) -> Matcher:
        """One that stands at the beginning; cheap."""
        ...


class GrammarLibrary(Protocol):
    """Compiles rules for one vocabulary."""

    @property
    def threads(self) -> int:
        """How many matchers are worked on at a time where several are given, at most."""
        ...

    @property
    def mask_words(self) -> int:
        """int32 words of a mask: 32 ids each, that of the least value first."""
        ...

    def compile(self, structure: StructuredOutput) -> CompiledRule:
        """Any thread may call it; takes a millisecond or, of hostile rules, some seconds.

        Raises InvalidArgumentError with the public field and what is wrong with the rule.
        """
        ...

    def accept(self, tokens: Sequence[tuple[Matcher, int]]) -> list[int]:
        """Each matcher goes on by the token id beside it; the places of those with a fault now.

        A matcher that breaks has a fault, and no other suffers. When this raises, nobody
        knows which of them went on, and none is to be used again.
        """
        ...

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bitmasks: Int32Array) -> list[int]:
        """Writes each matcher's mask in the row of `bitmasks` that is named beside it; the
        places among `matchers` of those with a fault now.

        A mask has at least one bit set, unless the matcher has a fault; when its rule is
        complete, they are those of the eos ids. When this raises, it can be done again.
        """
        ...
