"""Tasks have an owner: none is lost, none outlives it."""

import asyncio
from contextlib import suppress

import pytest

from shared.notifier import Notifier
from shared.tasks import TaskSet, first_of


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append(name)


async def test_leaving_the_block_cancels_every_task_and_waits_for_its_finally() -> None:
    ended: list[str] = []
    async with TaskSet() as tasks:
        for name in ("a", "b"):
            tasks.start(forever(ended, name), name=name)
        await asyncio.sleep(0)
        assert len(tasks) == 2
    assert sorted(ended) == ["a", "b"]
    assert len(tasks) == 0


async def test_a_task_that_missed_its_cancellation_is_cancelled_again() -> None:
    async def deaf_at_first() -> None:
        # As a TaskGroup is when a child fails in the moment of the cancellation.
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with TaskSet(cancel_again_s=0.01) as tasks:
        task = tasks.start(deaf_at_first(), name="deaf")
        await asyncio.sleep(0)
    assert task.cancelled()


async def test_a_failing_task_is_told_of_and_leaves_the_others_alone() -> None:
    errors: list[BaseException] = []
    told = asyncio.Event()

    def on_error(error: BaseException) -> None:
        errors.append(error)
        told.set()

    async def fail() -> None:
        raise ValueError("broken")

    async with TaskSet(on_error) as tasks:
        other = tasks.start(forever([], "other"), name="other")
        tasks.start(fail(), name="failing")
        await told.wait()
        assert [str(error) for error in errors] == ["broken"]
        assert not other.done()


async def test_a_finished_task_is_forgotten_and_its_result_kept() -> None:
    async def answer() -> int:
        return 42

    async with TaskSet() as tasks:
        assert await tasks.start(answer(), name="answer") == 42
        assert len(tasks) == 0


async def test_joining_waits_for_the_tasks_but_not_longer_than_told() -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    async with TaskSet() as tasks:
        tasks.start(wait(), name="wait")
        assert not await tasks.join(timeout_s=0.01)
        release.set()
        assert await tasks.join(timeout_s=5)


async def test_a_task_may_cancel_the_set_it_lives_in() -> None:
    ended: list[str] = []
    async with TaskSet() as tasks:

        async def end_all() -> str:
            await tasks.cancel()
            return "survived"

        tasks.start(forever(ended, "other"), name="other")
        await asyncio.sleep(0)
        assert await tasks.start(end_all(), name="end all") == "survived"
    assert ended == ["other"]


async def test_every_waiter_sees_a_change_and_a_late_one_waits_for_the_next() -> None:
    notifier, state = Notifier(), {"value": 0}

    async def reaches(wanted: int) -> None:
        await notifier.until(lambda: state["value"] >= wanted)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for wanted in (1, 1, 2):
            tasks.create_task(reaches(wanted))
        changed = tasks.create_task(notifier.changed())
        await asyncio.sleep(0)
        for value in (1, 2):
            state["value"] = value
            notifier.notify()
            await asyncio.sleep(0)
        await changed
    late = asyncio.Task(notifier.changed())
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late


async def test_the_first_of_several_ends_the_wait_and_the_others() -> None:
    ended: list[str] = []
    await first_of(forever(ended, "slow"), asyncio.sleep(0.01))
    assert ended == ["slow"]


async def test_what_the_first_of_several_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await first_of(asyncio.Event().wait(), fail())
