"""A rule that many follow is compiled again, so that its matchers can go on side by side."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from shared.types import StructuredOutput, StructureKind
from tests.worker.structured.fake_library import FakeLibrary, rule
from tests.worker.structured.vocabulary import library
from worker.structured.contract import CompiledRule, GrammarLibrary
from worker.structured.outputs import StructuredOutputs

WAIT_S = 20.0
CACHE_BYTES = 100_000
# As many as follow one copy.
FEW = 8
NOTHING_IS_COMPILED_S = 0.1


class Following:
    """Structured outputs of many requests."""

    def __init__(self, grammars: GrammarLibrary, cache_bytes: int = CACHE_BYTES) -> None:
        self.outputs = StructuredOutputs(
            grammars,
            cache_entries=4,
            cache_bytes=cache_bytes,
            timeout_s=60.0,
            max_rows=64,
            wake=lambda: None,
        )

    def begin(self, uids: Sequence[int], structure: StructuredOutput) -> None:
        waiting = {uid for uid in uids if not self.outputs.begin(uid, structure, now=0.0)}

        def all_may_run() -> bool:
            for uid, error in self.outputs.take_ready(now=0.0):
                assert error is None
                waiting.remove(uid)
            return not waiting

        wait_until(all_may_run)

    def accept(self, uids: Sequence[int], token_id: int) -> None:
        assert not self.outputs.accept([(uid, token_id) for uid in uids])


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


@pytest.fixture
def grammars() -> FakeLibrary:
    return FakeLibrary(vocab_size=100, eos=0, threads=3)


@pytest.fixture
def following(grammars: FakeLibrary) -> Iterator[Following]:
    following = Following(grammars)
    yield following
    following.outputs.close()


def test_there_are_as_many_copies_as_followers_need_and_threads_can_use(
    following: Following, grammars: FakeLibrary
) -> None:
    following.begin(range(FEW), rule([1]))
    assert grammars.compiled == ["1"]
    following.begin([FEW], rule([1]))
    wait_until(lambda: grammars.compiled == ["1", "1"])
    following.begin(range(10, 60), rule([1]))
    wait_until(lambda: grammars.compiled == ["1"] * 3)
    following.begin([60], rule([2]))
    time.sleep(NOTHING_IS_COMPILED_S)
    assert grammars.compiled == ["1"] * 3 + ["2"]


@pytest.mark.parametrize("why", ["one thread", "large rules", "no room"])
def test_there_are_no_copies_where_they_are_no_use_or_take_too_much(
    following: Following, grammars: FakeLibrary, why: str
) -> None:
    match why:
        case "one thread":
            grammars.threads = 1
        case "large rules":
            grammars.rule_bytes = 10_000_000
        case "no room":
            grammars.rule_bytes = CACHE_BYTES * 6 // 10
    following.begin(range(40), rule([1, 2]))
    following.accept(range(40), 1)
    time.sleep(NOTHING_IS_COMPILED_S)
    # A rule that is larger than the cache is compiled for each who asks.
    assert set(grammars.accepted_by) == {1}


def test_copies_take_room_of_other_rules(following: Following, grammars: FakeLibrary) -> None:
    grammars.rule_bytes = CACHE_BYTES * 3 // 10
    following.begin([1], rule([1]))
    following.begin([2], rule([2]))
    following.begin(range(10, 30), rule([2]))
    wait_until(lambda: grammars.compiled == ["1", "2", "2", "2"])
    following.begin([3], rule([1]))
    assert grammars.compiled[4:] == ["1"]


def test_a_rule_that_is_copied_is_not_the_one_that_makes_room(
    following: Following, grammars: FakeLibrary
) -> None:
    grammars.rule_bytes = CACHE_BYTES * 3 // 10
    grammars.gate.clear()
    # Compiled and told of together, the one with many followers first.
    for uid in range(20):
        following.outputs.begin(uid, rule([1]), now=0.0)
    following.outputs.begin(20, rule([2]), now=0.0)
    grammars.gate.set()
    wait_until(lambda: len(grammars.compiled) == 2)
    ready: list[int] = []

    def all_are_told() -> bool:
        ready.extend(uid for uid, _ in following.outputs.take_ready(now=0.0))
        return len(ready) == 21

    wait_until(all_are_told)
    wait_until(lambda: grammars.compiled.count("1") == 3)
    following.begin([21], rule([1]))
    assert grammars.compiled.count("1") == 3


def test_those_who_have_ended_do_not_count(following: Following, grammars: FakeLibrary) -> None:
    for begin in range(0, 60, FEW):
        following.begin(range(begin, begin + FEW), rule([1]))
        following.outputs.forget(set())
    # A fault ends a request as well.
    following.begin([60], rule([1]))
    assert following.outputs.accept([(60, 9)])
    following.begin(range(61, 61 + FEW), rule([1]))
    time.sleep(NOTHING_IS_COMPILED_S)
    assert grammars.compiled == ["1"] * 2


def test_those_who_came_together_part_at_their_first_token(
    following: Following, grammars: FakeLibrary
) -> None:
    following.begin([0], rule([1, 2]))
    grammars.gate.clear()
    following.begin(range(1, 60), rule([1, 2]))
    following.accept(range(30), 1)
    assert grammars.accepted_by == {1: 30}
    grammars.gate.set()
    wait_until(lambda: len(grammars.compiled) == 3)
    for uid in range(30, 60):
        following.accept([uid], 1)
        # For the copies to be there after all.
        time.sleep(0.005)
    assert sum(grammars.accepted_by.values()) == 60
    assert min(grammars.accepted_by[copy] for copy in (2, 3)) >= 5
    # And no more later: each goes on where it has been.
    before = dict(grammars.accepted_by)
    following.accept(range(60), 2)
    assert grammars.accepted_by == {copy: 2 * count for copy, count in before.items()}


def test_a_copy_that_fails_is_done_without(following: Following, grammars: FakeLibrary) -> None:
    following.begin([0], rule([1, 2]))
    grammars.broken["compile", 1] = RuntimeError("no copy")
    following.begin(range(1, 40), rule([1, 2]))
    wait_until(lambda: len(grammars.compiled) == 3)
    following.accept(range(40), 1)
    following.accept(range(40), 2)
    assert grammars.accepted_by == {1: 80}


def test_copies_follow_as_one_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = library(threads=3)
    many, alone = Following(grammars, 100 * CACHE_BYTES), Following(library())
    compiled: list[CompiledRule] = []

    def compile_and_note(structure: StructuredOutput) -> CompiledRule:
        compiled.append(compile_rule(structure))
        return compiled[-1]

    compile_rule = grammars.compile
    monkeypatch.setattr(grammars, "compile", compile_and_note)
    schema = (
        '{"type": "object", "properties": {"name": {"type": "string"}, "id": {"type": "integer"}}}'
    )
    structure = StructuredOutput(StructureKind.JSON_SCHEMA, schema)
    uids, rng = list(range(40)), np.random.default_rng(0)
    try:
        for one in (many, alone):
            one.begin(uids, structure)
        wait_until(lambda: len(compiled) == 3)
        for _ in range(25):
            masks, faults = many.outputs.fill(uids)
            expected, none = alone.outputs.fill(uids)
            assert not faults
            assert not none
            assert np.array_equal(masks, expected)
            bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
            tokens = [int(rng.choice(np.flatnonzero(row))) for row in bits]
            for one in (many, alone):
                assert not one.outputs.accept(zip(uids, tokens, strict=True))
    finally:
        many.outputs.close()
        alone.outputs.close()
