"""A matcher that holds up every step is given up, and it alone."""

import time
from collections.abc import Sequence

from shared.errors import Code
from tests.worker.structured.fake_library import FakeLibrary, FakeMatcher, rule
from worker.step import Int32Array
from worker.structured.contract import Matcher
from worker.structured.outputs import StructuredOutputs

SLOW_UID, FAST_UID = 1, 2
SLOW_TOKEN, FAST_TOKEN = 8, 9
MANY = 200


class SlowLibrary(FakeLibrary):
    """Computes for 50 ms for each mask of a rule that begins with SLOW_TOKEN."""

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bitmasks: Int32Array) -> list[int]:
        faulty = super().fill(matchers, bitmasks)
        for matcher, _ in matchers:
            assert isinstance(matcher, FakeMatcher)
            end = time.thread_time() + 0.05
            while matcher.token_ids[0] == SLOW_TOKEN and time.thread_time() < end:
                pass
        return faulty


def test_a_rule_that_is_slow_to_follow_is_given_up_and_its_mate_goes_on() -> None:
    outputs = StructuredOutputs(
        SlowLibrary(vocab_size=100, eos=0),
        cache_entries=4,
        timeout_s=60.0,
        max_rows=2,
        wake=lambda: None,
    )
    waiting = {SLOW_UID, FAST_UID}
    for uid, token in ((SLOW_UID, SLOW_TOKEN), (FAST_UID, FAST_TOKEN)):
        assert not outputs.begin(uid, rule([token] * MANY), now=0.0)
    while waiting:
        waiting -= {uid for uid, _ in outputs.take_ready(now=0.0)}
    live = {SLOW_UID: SLOW_TOKEN, FAST_UID: FAST_TOKEN}
    ended_at = None
    for step in range(60):
        _, faults = outputs.fill(list(live))
        for uid, error in faults:
            assert (uid, error.code) == (SLOW_UID, Code.INVALID_ARGUMENT)
            assert error.field == "structured_output"
            ended_at = step
            del live[uid]
        assert not outputs.accept(live.items())
    assert ended_at is not None and ended_at < 30
    assert list(live) == [FAST_UID]
    outputs.close()
