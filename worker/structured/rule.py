"""A rule that many requests follow at a time."""

from shared.types import StructuredOutput
from worker.structured.contract import CompiledRule, Matcher


class Rule:
    """A compiled rule, and copies of it that come while it is used.

    Matchers of one copy wait for each other, those of different ones go on side by side. One
    thread uses it; another may add copies.
    """

    def __init__(self, structure: StructuredOutput, compiled: CompiledRule) -> None:
        self.structure = structure
        self.num_bytes = compiled.num_bytes
        self.num_followers = 0
        # With those that are still to come.
        self.num_copies = 1
        self._copies = [compiled]
        self._turn = 0

    @property
    def has_copies(self) -> bool:
        return len(self._copies) > 1

    def add(self, compiled: CompiledRule) -> None:
        self._copies.append(compiled)

    def matcher(self) -> Matcher:
        """One that stands at the beginning, of each copy in turn."""
        self._turn = (self._turn + 1) % len(self._copies)
        return self._copies[self._turn].matcher()
