"""The parent of several processes: starts, restarts, gives up, drains and ends them.

The processes are small programs; what real ones do is in tests/integration/test_processes.py.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gateway.config import resolved_processes
from gateway.supervisor import RestartPolicy, Supervisor

# Says that it runs, and ends with 0 when it is told to.
OBEDIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open(sys.argv[1], "a").write("x")
while True:
    time.sleep(60)
"""
DEAF = OBEDIENT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
# Lives long enough for another to be well, then five times not at all, then as it should.
DYING = (
    """
import os, sys, time
num_before = os.path.getsize(sys.argv[1]) if os.path.exists(sys.argv[1]) else 0
if num_before < 6:
    open(sys.argv[1], "a").write("x")
    time.sleep(0.0 if num_before else 1.0)
    sys.exit(2)
"""
    + OBEDIENT
)
# Speaks for as long as it is well, which is for a moment the first time.
HANGING = """
import os, sys, time
num_before = os.path.getsize(sys.argv[1]) if os.path.exists(sys.argv[1]) else 0
open(sys.argv[1], "a").write("x")
for _ in range(10_000 if num_before else 3):
    os.write(0, b".")
    time.sleep(0.02)
time.sleep(60)
"""
# Leaves another letter for a hang-up; says that it is able once it has an ear for it.
HEARING = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, lambda *_: open(sys.argv[1], "a").write("h"))
open(sys.argv[1], "a").write("x")
os.write(0, b"a")
while True:
    time.sleep(60)
"""
# Able, and would be ended by a hang-up; leaves another letter as soon as it is told to stop.
LEAVING = """
import os, signal, sys, time
def leave(*_):
    open(sys.argv[1], "a").write("l")
    for _ in range(10):
        os.write(0, b".")
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1], "a").write("x")
os.write(0, b"a")
while True:
    time.sleep(60)
"""
FAST = RestartPolicy(
    settled_s=0.5, first_wait_s=0.01, longest_wait_s=0.05, max_early_deaths=3, hang_s=0.5
)


class Supervised:
    """A supervisor at work on small programs, which leave a letter at each start."""

    def __init__(self, folder: Path, *programs: str, drain_limit_s: float = 10.0) -> None:
        self._folder = folder
        self.counts: list[int] = []
        self.losses: list[int] = []
        self._supervisor = Supervisor(
            lambda slot: [sys.executable, "-c", programs[slot], str(self._starts(slot))],
            os.environ,
            len(programs),
            drain_limit_s=drain_limit_s,
            policy=FAST,
            forwarded=(signal.SIGHUP,),
            on_change=self.counts.append,
            on_loss=self.losses.append,
        )

    async def run(self) -> int:
        async with asyncio.timeout(30):
            return await self._supervisor.run()

    def num_starts(self, slot: int) -> int:
        path = self._starts(slot)
        return path.stat().st_size if path.exists() else 0

    def _starts(self, slot: int) -> Path:
        return self._folder / f"starts-{slot}"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes tell nobody
            await asyncio.sleep(0.01)


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [child for child in found if "starts-" in " ".join(child.cmdline())]


async def test_a_signal_drains_all_and_the_exit_code_is_0(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, OBEDIENT, OBEDIENT)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == supervised.num_starts(1) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.result() == 0
    assert supervised.counts == [1, 2, 1, 0]
    assert not supervised.losses


async def test_a_process_that_dies_is_started_anew_and_the_others_stay(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, OBEDIENT, OBEDIENT)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == supervised.num_starts(1) == 1)
        victim = next(child for child in children() if child.cmdline()[-1].endswith("starts-1"))
        victim.kill()
        await until(lambda: supervised.num_starts(1) == 2)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.result() == 0
    assert supervised.losses == [1]
    assert supervised.num_starts(0) == 1


async def test_processes_that_die_at_once_again_and_again_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervised = Supervised(tmp_path, "import sys; sys.exit(7)")
    assert await supervised.run() == 1
    assert len(supervised.losses) == FAST.max_early_deaths
    assert "ended 3 times within 0.5 s of its start" in (said := capsys.readouterr().err)
    assert "exit code 7" in said


async def test_one_that_cannot_work_as_it_is_told_to_is_not_tried_again(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "import sys; sys.exit(2)", OBEDIENT)
    assert await supervised.run() == 2
    assert supervised.losses == [0]
    assert not children()


async def test_while_another_is_well_a_dying_one_is_tried_for_ever(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, OBEDIENT, DYING)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(1) == 7)
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.result() == 0
    assert supervised.losses == [1] * 6
    assert supervised.num_starts(0) == 1


async def test_one_that_does_not_drain_is_killed_and_the_exit_code_tells(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, DEAF, OBEDIENT, drain_limit_s=0.3)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == supervised.num_starts(1) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.result() == 1
    assert not children()


async def test_one_that_is_silent_has_hung_and_is_started_anew(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, HANGING, OBEDIENT)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == 2)
        # The second one has spoken for longer than the first was silent, and lives.
        await asyncio.sleep(1.2 * FAST.hang_s)
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.result() == 0
    # One that has never spoken is not expected to.
    assert supervised.losses == [0]


async def test_a_hang_up_is_passed_on_to_those_that_have_an_ear_for_it(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, HEARING, OBEDIENT)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == supervised.num_starts(1) == 1)
        # Until it has said that it is able, nothing is passed on to it.
        while supervised.num_starts(0) == 1:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.result() == 0
    # The other, whom a hang-up would end, is where it was.
    assert not supervised.losses


async def test_a_hang_up_is_passed_on_to_none_that_leaves(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, LEAVING)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: supervised.num_starts(0) == 2)
        os.kill(os.getpid(), signal.SIGHUP)
    assert run.result() == 0


async def test_a_second_signal_kills_at_once_and_is_the_exit(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, DEAF, DEAF)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervised.run())
        await until(lambda: supervised.num_starts(0) == supervised.num_starts(1) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(3):
            assert await run == -signal.SIGINT
    assert not children()


async def test_a_command_that_is_not_there_is_a_failure_and_no_traceback(tmp_path: Path) -> None:
    supervisor = Supervisor(
        lambda _: [str(tmp_path / "nothing")], {}, 2, drain_limit_s=1.0, policy=FAST
    )
    async with asyncio.timeout(20):
        assert await supervisor.run() == 1


@pytest.mark.parametrize(
    ("told", "cores", "num_processes"),
    [(None, 1, 1), (None, 2, 1), (None, 5, 4), (None, 64, 8), (3, 1, 3), (12, 64, 12)],
)
def test_unless_told_there_is_a_process_for_each_core_but_one(
    told: int | None, cores: int, num_processes: int
) -> None:
    assert resolved_processes(told, cores) == num_processes
