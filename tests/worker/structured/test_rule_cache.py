"""The compiler's cache: bounded in number and size, by content, refusals included."""

import threading
from collections.abc import Iterator

import pytest

from shared.errors import Code, InvalidArgumentError, ServingError
from shared.types import StructuredOutput, StructureKind
from tests.worker.structured.fake_library import NONSENSE, FakeLibrary, rule
from worker.structured.outputs import StructuredOutputs

WAIT_S = 20.0
CACHE_BYTES = 100_000


class Compiling:
    """Structured outputs that keep two rules, of CACHE_BYTES together."""

    def __init__(self) -> None:
        self.grammars = FakeLibrary(vocab_size=100, eos=0)
        self._news = threading.Event()
        self.outputs = StructuredOutputs(
            self.grammars,
            cache_entries=2,
            cache_bytes=CACHE_BYTES,
            timeout_s=60.0,
            max_rows=8,
            wake=self._news.set,
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


def test_a_large_rule_takes_the_place_of_others(compiling: Compiling) -> None:
    compiling.grammars.rule_bytes = CACHE_BYTES * 6 // 10
    for token_ids in ([1], [2], [2], [1]):
        compiling.ask(rule(token_ids))
    assert compiling.grammars.compiled == ["1", "2", "1"]


def test_a_rule_larger_than_the_cache_displaces_no_other(compiling: Compiling) -> None:
    compiling.ask(rule([1]))
    compiling.grammars.rule_bytes = CACHE_BYTES + 1
    for _ in range(2):
        compiling.ask(rule([2]))
    compiling.ask(rule([1]))
    assert compiling.grammars.compiled == ["1", "2", "2"]


def test_the_texts_of_rules_count_too(compiling: Compiling) -> None:
    for first in (1, 2, 1):
        compiling.ask(rule([first, *[3] * (CACHE_BYTES * 3 // 10)]))
    assert [text[0] for text in compiling.grammars.compiled] == ["1", "2", "1"]


def test_choices_count_as_texts(compiling: Compiling) -> None:
    for first in ("1", "2", "1"):
        choices = tuple(f"{first} {i}" for i in range(1000))
        compiling.ask(StructuredOutput(StructureKind.CHOICE, "5", choices))
    assert len(compiling.grammars.compiled) == 3


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("bug"), BaseException("panic")])
def test_a_failure_that_need_not_come_again_is_not_kept(
    compiling: Compiling, error: BaseException
) -> None:
    compiling.grammars.broken["compile", 1] = error
    with pytest.raises(ServingError, match="log") as raised:
        compiling.ask(rule([1]))
    assert raised.value.code is Code.INTERNAL
    compiling.grammars.broken.clear()
    compiling.ask(rule([1]))
    assert compiling.grammars.compiled == ["1", "1"]


def test_a_refusal_that_is_asked_for_often_does_not_grow(compiling: Compiling) -> None:
    bad = StructuredOutput(StructureKind.GRAMMAR, NONSENSE)
    depths = []
    for _ in range(4):
        with pytest.raises(InvalidArgumentError) as raised:
            compiling.ask(bad)
        depths.append(len(raised.traceback))
    assert depths[1] == depths[3]


def test_a_rule_that_went_wrong_in_use_is_compiled_anew(compiling: Compiling) -> None:
    compiling.ask(rule([1, 1]))
    compiling.grammars.limit = 1
    ((uid, error),) = compiling.outputs.accept([(1, 1)])
    assert (uid, error.code) == (1, Code.INVALID_ARGUMENT)
    compiling.ask(rule([1, 1]))
    assert compiling.grammars.compiled == ["1 1", "1 1"]


def test_rules_of_other_kinds_with_the_same_text_are_others(compiling: Compiling) -> None:
    compiling.ask(StructuredOutput(StructureKind.GRAMMAR, "1"))
    compiling.ask(StructuredOutput(StructureKind.REGEX, "1"))
    assert compiling.grammars.compiled == ["1", "1"]


def test_what_nobody_waits_for_any_more_is_not_compiled(compiling: Compiling) -> None:
    compiling.grammars.gate.clear()
    # One more than there are compilers.
    for uid in (1, 2, 3):
        compiling.outputs.begin(uid, rule([uid]), now=0.0)
    compiling.outputs.forget(set())
    compiling.grammars.gate.set()
    compiling.ask(rule([4]))
    assert "3" not in compiling.grammars.compiled
