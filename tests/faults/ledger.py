"""What became of every request: counted, and held to what a client may rely on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

Status = grpc.StatusCode

# What may come of a request whatever happens to the services.
ALWAYS = frozenset({"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})
_MOST_VIOLATIONS = 20


@dataclass(slots=True)
class Ledger:
    """Every request that ended, by how it did, and what no fault excuses."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    # What may come of a request now.
    allowed: frozenset[str] = ALWAYS

    @property
    def num_requests(self) -> int:
        return self.outcomes.total()

    def end(self, outcome: str, detail: str = "") -> None:
        """Counts the one ending of a request."""
        self.outcomes[outcome] += 1
        if outcome not in self.allowed:
            self.violate(f"ended {outcome}: {detail}")

    def violate(self, what: str) -> None:
        """Notes what must not be."""
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(what)

    def check_echo(self, prompt: Sequence[int], received: Sequence[int], *, whole: bool) -> None:
        """An echo is the prompt, or a beginning of it where the stream broke off."""
        expected = prompt if whole else prompt[: len(received)]
        if list(received) != list(expected):
            self.violate(f"an echo of {len(prompt)} tokens came back wrong: {received[:20]}…")
