"""The compiler's cache: bounded, by content, refusals included."""

import threading
from collections.abc import Iterator

import pytest

from shared.errors import InvalidArgumentError
from shared.types import StructuredOutput, StructureKind
from tests.worker.structured.fake_library import NONSENSE, FakeLibrary, rule
from worker.structured.outputs import StructuredOutputs

WAIT_S = 20.0


class Compiling:
    """Structured outputs that keep two rules."""

    def __init__(self) -> None:
        self.grammars = FakeLibrary(vocab_size=100, eos=0)
        self._news = threading.Event()
        self.outputs = StructuredOutputs(
            self.grammars, cache_entries=2, timeout_s=60.0, max_rows=8, wake=self._news.set
        )
        self._num_requests = 0

    def ask(self, structure: StructuredOutput) -> None:
        """Asks for the rule and waits until it may be followed; raises what refuses it."""
        self._num_requests += 1
        self._news.clear()
        if self.outputs.begin(self._num_requests, structure, now=0.0):
            return
        assert self._news.wait(WAIT_S)
        ((uid, error),) = self.outputs.take_ready(now=0.0)
        assert uid == self._num_requests
        if error is not None:
            raise error


@pytest.fixture
def compiling() -> Iterator[Compiling]:
    compiling = Compiling()
    yield compiling
    compiling.outputs.close()


def test_the_rule_that_was_not_used_for_longest_is_dropped(compiling: Compiling) -> None:
    for token_ids in ([1], [2], [1], [3], [1], [2]):
        compiling.ask(rule(token_ids))
    assert compiling.grammars.compiled == ["1", "2", "3", "2"]


def test_a_refusal_is_kept_too(compiling: Compiling) -> None:
    bad = StructuredOutput(StructureKind.GRAMMAR, NONSENSE)
    for _ in range(3):
        with pytest.raises(InvalidArgumentError):
            compiling.ask(bad)
    assert compiling.grammars.compiled == [NONSENSE]


def test_rules_of_other_kinds_with_the_same_text_are_others(compiling: Compiling) -> None:
    compiling.ask(StructuredOutput(StructureKind.GRAMMAR, "1"))
    compiling.ask(StructuredOutput(StructureKind.REGEX, "1"))
    assert compiling.grammars.compiled == ["1", "1"]


def test_what_nobody_waits_for_any_more_is_not_compiled(compiling: Compiling) -> None:
    compiling.grammars.gate.clear()
    # One more than there are compilers.
    for uid in (1, 2, 3):
        compiling.outputs.begin(uid, rule([uid]), now=0.0)
    compiling.outputs.forget(lambda uid: False)
    compiling.grammars.gate.set()
    compiling.ask(rule([4]))
    assert "3" not in compiling.grammars.compiled
