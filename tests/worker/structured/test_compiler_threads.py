"""The compiler's threads: in order, bounded in what they queue, and no burden to the end."""

import subprocess
import sys
import time

from tests.worker.structured.fake_library import FakeLibrary, rule
from worker.structured.compiler_threads import CompilerThreads

WAIT_S = 20.0

_ENDS_AMID_A_RULE = """
from shared.types import StructuredOutput, StructureKind
from tests.worker.structured.fake_library import FakeLibrary, rule
from worker.structured.outputs import StructuredOutputs

library = FakeLibrary(100, 0, gated=True)
outputs = StructuredOutputs(library, cache_entries=1, timeout_s=60, max_rows=1, wake=lambda: None)
outputs.begin(1, rule([1]), 0.0)
assert library.compiling.wait(20)
outputs.close()
print("closed")
"""


def test_a_process_ends_although_a_rule_is_never_compiled() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_AMID_A_RULE],
        timeout=WAIT_S,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "closed\n"


def test_closing_waits_for_what_is_about_to_end_and_cancels_the_rest() -> None:
    library = FakeLibrary(100, 0, gated=True)
    threads = CompilerThreads(1)
    begun, queued = (threads.submit(library.compile, rule([i])) for i in (1, 2))
    assert library.compiling.wait(WAIT_S)
    queued.add_done_callback(lambda _: library.gate.set())
    threads.stop()
    threads.join(time.monotonic() + WAIT_S)
    assert begun.done() and not begun.cancelled()
    assert queued.cancelled()
    assert library.compiled == ["1"]


def test_closing_is_patient_for_so_long_and_no_longer() -> None:
    library = FakeLibrary(100, 0, gated=True)
    threads = CompilerThreads(2)
    begun = threads.submit(library.compile, rule([1]))
    assert library.compiling.wait(WAIT_S)
    began_at = time.monotonic()
    threads.stop()
    threads.join(time.monotonic() + 0.05)
    assert 0.05 <= time.monotonic() - began_at < 1.0
    assert not begun.done()
    library.gate.set()


def test_cancelled_rules_are_passed_over_and_count_until_then() -> None:
    library = FakeLibrary(100, 0, gated=True)
    threads = CompilerThreads(1)
    first = threads.submit(library.compile, rule([1]))
    assert library.compiling.wait(WAIT_S)
    second, third = (threads.submit(library.compile, rule([i])) for i in (2, 3))
    assert second.cancel()
    assert threads.num_queued == 2
    library.gate.set()
    for future in (first, third):
        future.result(WAIT_S)
    assert library.compiled == ["1", "3"]
    assert threads.num_queued == 0
    threads.stop()
    threads.join(time.monotonic() + WAIT_S)
