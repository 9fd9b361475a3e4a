"""`tandem up` and `tandem demo` with real services, the echo engine in place of a model."""

import asyncio
import os
import re
import signal
import socket
import sys

import psutil
import pytest

from gateway.cli.pair import free_address
from tests.cli.terminal import Terminal, tandem

ECHO = ("--", "--engine", "echo")
# Both run, though the worker is still loading.
LISTENING = "gateway |"


async def started(
    gateway: str, until: str = "Ctrl-C stops both.", gateway_processes: int = 1
) -> tuple[Terminal, list[psutil.Process]]:
    """A `tandem up` that has written `until`, with all of its descendants."""
    listen = ("--listen", gateway, "--worker-listen", free_address())
    processes = ("--gateway-processes", str(gateway_processes))
    terminal = await Terminal.start("up", *listen, *processes, *ECHO)
    await terminal.read_err(until)
    return terminal, psutil.Process(terminal.pid).children(recursive=True)


async def assert_gone(processes: list[psutil.Process]) -> None:
    """Fails when one is still there after ten seconds."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=10)
    assert not alive


async def test_ctrl_c_stops_the_gateway_first_and_leaves_nothing() -> None:
    gateway = free_address()
    terminal, children = await started(gateway)
    # A worker, its engine process, and a gateway.
    assert len(children) >= 3
    assert (await tandem("health", "--address", gateway)).out == "SERVING\n"
    terminal.interrupt()
    run = await terminal.end()
    assert run.code == 0
    order = re.findall(r"^(worker|gateway) +\|.* draining", run.err, re.MULTILINE)
    assert order == ["gateway", "worker"]
    await assert_gone(children)


async def test_a_second_ctrl_c_kills_at_once() -> None:
    terminal, children = await started(free_address(), until=LISTENING, gateway_processes=2)
    # A stopped process does not drain.
    for child in children:
        child.suspend()
    terminal.interrupt()
    await terminal.read_err("once more kills")
    terminal.interrupt()
    assert "killed" in (await terminal.end()).err
    await assert_gone(children)


async def test_a_service_that_dies_is_told_with_its_exit_code() -> None:
    terminal, children = await started(free_address(), until=LISTENING)
    (gateway,) = (c for c in children if c.cmdline()[:4][-1] == "gateway")
    gateway.send_signal(signal.SIGKILL)
    run = await terminal.end()
    assert run.code == 128 + signal.SIGKILL
    assert "gateway ended by itself with SIGKILL" in run.err
    await assert_gone(children)


@pytest.mark.parametrize("gateway_processes", [1, 2])
async def test_no_service_outlives_a_killed_parent(gateway_processes: int) -> None:
    terminal, children = await started(free_address(), gateway_processes=gateway_processes)
    names = [name for child in children for name in child.cmdline()]
    assert names.count("gateway.process") == (0 if gateway_processes == 1 else 2)
    terminal.kill()
    await terminal.end()
    await assert_gone(children)


async def test_it_stops_although_nobody_reads_what_it_says() -> None:
    read_end, write_end = os.pipe()
    listen = ("--listen", free_address(), "--worker-listen", free_address())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", "up", *listen, *ECHO, stderr=write_end
    )
    os.close(write_end)
    with os.fdopen(read_end, errors="replace") as said:
        while LISTENING not in await asyncio.to_thread(said.readline):
            pass
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    await assert_gone(children)


async def test_an_address_in_use_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = await tandem("up", "--listen", address, "--worker-listen", free_address())
    assert run.code == 1
    assert run.err == f"error: cannot listen on {address}: Address already in use\n"


async def test_a_worker_that_refuses_its_flags_ends_both() -> None:
    listen = ("--listen", free_address(), "--worker-listen", free_address())
    run = await tandem("up", *listen, "--", "--page-size", "3")
    assert run.code == 2
    assert "worker ended by itself with exit code 2" in run.err
    assert "power of two" in run.err


@pytest.mark.parametrize("service", ["worker", "gateway"])
async def test_service_commands_hand_on_help_and_flags(service: str) -> None:
    run = await tandem(service, "--help")
    assert run.code == 0
    assert f"usage: tandem {service}" in run.out
    assert (await tandem(service, "--no-such-flag")).code == 2


async def test_demo_streams_an_answer_and_stops_both() -> None:
    run = await tandem("demo", "Say this again.", *ECHO)
    assert run.code == 0
    # The echo of the rendered chat, up to the end of its first turn.
    assert run.out.startswith("system\n")
    assert "gateway ready" in run.err
    assert "tokens/s" in run.err
