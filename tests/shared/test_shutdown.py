"""Signals as an event: the first is told, the second kills."""

import asyncio
import os
import signal
import sys

import pytest

from shared.shutdown import shutdown_event

PROGRAM = """
import asyncio
from shared.shutdown import shutdown_event

async def main():
    with shutdown_event() as stop:
        print("ready", flush=True)
        await stop.wait()
        print("told", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_sets_the_event_and_handling_comes_back(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with shutdown_event() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            await stop.wait()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_the_second_signal_kills(second: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"ready\n"
        process.terminate()
        assert await process.stdout.readline() == b"told\n"
        process.send_signal(second)
        assert await process.wait() == -second
