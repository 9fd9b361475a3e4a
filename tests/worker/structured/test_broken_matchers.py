"""A matcher that raises ends its own request as a fault of ours, and nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest

from shared.errors import Code
from shared.types import FinishReason
from tests.worker.running_loop import EOS, INFO, Running, failed, finished
from tests.worker.structured.fake_library import FakeLibrary, rule
from tests.worker.structured.vocabulary import ids_of
from worker.structured.outputs import StructuredOutputs

BROKEN, GOOD, OTHER = 8, 9, 10
EVERYWHERE = ("matcher", "fill", "accept", "fault")


class Panic(BaseException):
    """As the library's: no Exception."""


ERRORS = [RuntimeError("secret"), MemoryError("secret"), Panic("secret")]


@pytest.fixture(params=[1, 2], ids=["one by one", "side by side"])
def grammars(request: pytest.FixtureRequest) -> FakeLibrary:
    return FakeLibrary(INFO.vocab_size, EOS, threads=request.param)


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def running(request: pytest.FixtureRequest, grammars: FakeLibrary) -> Iterator[Running]:
    running = Running(overlap=request.param, grammars=grammars)
    yield running
    running.close()


@pytest.fixture
def outputs(grammars: FakeLibrary) -> Iterator[StructuredOutputs]:
    """Of three rules, one for each of the uids 1 to 3: that of 1 will break."""
    outputs = StructuredOutputs(
        grammars, cache_entries=4, timeout_s=60.0, max_rows=4, wake=lambda: None
    )
    for uid, token in ((1, BROKEN), (2, GOOD), (3, OTHER)):
        assert not outputs.begin(uid, rule([token]), now=0.0)
    waiting = {1, 2, 3}
    while waiting:
        waiting -= {uid for uid, _ in outputs.take_ready(now=0.0)}
    yield outputs
    outputs.close()


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_its_request_ends_as_a_fault_of_ours_and_the_others_go_on(
    running: Running, grammars: FakeLibrary, where: str, error: BaseException
) -> None:
    grammars.broken[where, BROKEN] = error
    running.submit(1, [BROKEN, 5], structure=rule([BROKEN, 5]))
    running.submit(2, [GOOD, 5, 6], structure=rule([GOOD, 5, 6]))
    running.submit(3, [OTHER, 5, 6])
    end = failed(running.end_of(1))
    assert end.code is Code.INTERNAL
    assert "secret" not in end.message
    for uid in (2, 3):
        assert finished(running.end_of(uid)).reason is FinishReason.EOS
    # By now the rule would be known, so that the matcher is asked for when the request comes.
    running.submit(4, [BROKEN, 5], structure=rule([BROKEN, 5]))
    assert failed(running.end_of(4)).code is Code.INTERNAL
    running.submit(5, [GOOD], structure=rule([GOOD]))
    assert finished(running.end_of(5)).reason is FinishReason.EOS
    assert running.tokens[2] == [GOOD, 5, 6]


@pytest.mark.parametrize("place", range(3))
def test_the_step_gets_its_masks_whichever_row_breaks(
    outputs: StructuredOutputs, grammars: FakeLibrary, place: int
) -> None:
    grammars.broken["fill", BROKEN] = RuntimeError("no mask")
    uids = [2, 3]
    uids.insert(place, 1)
    bitmasks, faults = outputs.fill(uids)
    assert [(uid, error.code) for uid, error in faults] == [(1, Code.INTERNAL)]
    masks = {uid: ids_of(row) for uid, row in zip(uids, bitmasks.copy(), strict=True)}
    assert masks[2] == {GOOD}
    assert masks[3] == {OTHER}
    # It samples something, which nobody reads.
    assert masks[1] >= set(range(INFO.vocab_size))
    _, faults = outputs.fill([2, 3])
    assert not faults


@pytest.mark.parametrize("where", ["accept", "fault"])
def test_the_others_accept_their_tokens(
    outputs: StructuredOutputs, grammars: FakeLibrary, where: str
) -> None:
    grammars.broken[where, BROKEN] = RuntimeError("no token")
    faults = outputs.accept([(2, GOOD), (1, BROKEN), (3, OTHER)])
    assert [(uid, error.code) for uid, error in faults] == [(1, Code.INTERNAL)]
    bitmasks, faults = outputs.fill([2, 3])
    assert not faults
    assert [ids_of(row) for row in bitmasks] == [{EOS}, {EOS}]


def test_all_end_when_nobody_knows_who_has_accepted(
    outputs: StructuredOutputs, grammars: FakeLibrary
) -> None:
    grammars.threads = 2
    grammars.panic = Panic("secret")
    faults = outputs.accept([(2, GOOD), (3, OTHER)])
    assert [(uid, error.code) for uid, error in faults] == [
        (2, Code.INTERNAL),
        (3, Code.INTERNAL),
    ]
    assert not any("secret" in error.message for _, error in faults)
    # It was not asked.
    _, faults = outputs.fill([1])
    assert not faults


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_are_accepted_together_where_there_are_threads_for_it(
    outputs: StructuredOutputs, grammars: FakeLibrary, threads: int
) -> None:
    grammars.threads = threads
    assert not outputs.accept([(1, BROKEN), (2, GOOD), (7, OTHER)])
    assert not outputs.accept([(3, OTHER)])
    assert grammars.log == ([("accept", 2)] if threads > 1 else [])
    bitmasks, _ = outputs.fill([1, 2, 3])
    assert [ids_of(row) for row in bitmasks] == [{EOS}] * 3


def test_masks_are_written_where_they_are_wanted_and_nowhere_else(
    outputs: StructuredOutputs, grammars: FakeLibrary
) -> None:
    grammars.broken["fill", BROKEN] = RuntimeError("no mask")
    wanted = np.full((6, grammars.mask_words), 5, np.int32)
    bitmasks, _ = outputs.fill([3, 7, 1, 2], wanted)
    assert np.shares_memory(bitmasks, wanted) and len(bitmasks) == 4
    assert ids_of(wanted[0]) == {OTHER}
    assert (wanted[1:3] == -1).all()
    assert ids_of(wanted[3]) == {GOOD}
    assert (wanted[4:] == 5).all()


def test_what_ends_the_process_is_not_taken_for_a_fault_of_the_matcher(
    outputs: StructuredOutputs, grammars: FakeLibrary
) -> None:
    grammars.broken["fill", BROKEN] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        outputs.fill([1])
