"""`tandem up`: both services in one terminal, from loading to a clean Ctrl-C."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from gateway.cli.client import CallError
from gateway.cli.pair import (
    Pair,
    Service,
    ServiceCommand,
    ServiceError,
    require_free,
    running_pair,
)
from gateway.cli.terminal import stderr_console, write_error

START_TIMEOUT_S = 600.0

_STATUS_WIDTH = 100
_COLORS = {"worker": "cyan", "gateway": "magenta"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Where the two listen, what they are told, and how long the worker may load."""

    gateway_address: str
    worker_address: str
    worker_arguments: Sequence[str] = ()
    start_timeout_s: float = START_TIMEOUT_S
    shows_logs: bool = True
    gateway_processes: int = 1


async def up(options: UpOptions) -> int:
    """Runs both services until a signal or until one of them ends. Returns the exit code."""
    console = stderr_console()

    async def stay(pair: Pair) -> None:
        console.print(_examples(pair.gateway.address), markup=False)
        await pair.wait_exit()

    return await run_pair(options, console, stay)


async def run_pair(
    options: UpOptions, console: Console, work: Callable[[Pair], Awaitable[None]]
) -> int:
    """Starts both services, does the work once they serve, and stops both.

    A first signal ends the work and drains, the gateway before the worker; a second one
    kills both. Returns 0, or the exit code of what failed, after saying why.
    """
    human = ("--log-format", "human")
    worker = ServiceCommand("worker", options.worker_address, (*human, *options.worker_arguments))
    gateway_arguments = (
        *("--workers", options.worker_address),
        *("--processes", str(options.gateway_processes)),
    )
    gateway = ServiceCommand("gateway", options.gateway_address, (*human, *gateway_arguments))

    def on_line(name: str, line: str) -> None:
        if options.shows_logs:
            console.print(f"[{_COLORS[name]}]{name:<7} |[/] {escape(line)}")

    try:
        require_free(worker.address)
        require_free(gateway.address)
        async with running_pair(worker, gateway, on_line) as pair:
            with _stopping_on_signals(pair, console):
                try:
                    await _wait_serving(console, pair, options.start_timeout_s)
                    await work(pair)
                finally:
                    # Inside the block that hears a second signal.
                    await pair.stop()
    except asyncio.CancelledError:
        # Only a signal cancels this task, and stopping is what it asked for.
        console.print("stopped")
    except ServiceError as error:
        if not options.shows_logs:
            for line in error.lines:
                console.print(line, markup=False, style="dim")
        write_error(console, str(error))
        return error.exit_code
    except CallError as error:
        write_error(console, str(error))
        return 1
    return 0


@contextmanager
def _stopping_on_signals(pair: Pair, console: Console) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if pair.is_stopping:
            console.print("killed")
            pair.kill()
        else:
            console.print("stopping; once more kills")
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _wait_serving(console: Console, pair: Pair, timeout_s: float) -> None:
    began = time.monotonic()
    for service in (pair.worker, pair.gateway):
        with console.status("") as status:

            def show(service: Service = service, status: Status = status) -> None:
                seconds = time.monotonic() - began
                doing = (service.last_lines() or [""])[-1][:_STATUS_WIDTH]
                status.update(f"waiting for the {service.name}, {seconds:.0f} s  {escape(doing)}")

            await pair.wait_serving(service, timeout_s, show)
        seconds = time.monotonic() - began
        console.print(f"[green]{service.name} ready[/] at {service.address} after {seconds:.1f} s")


def _examples(address: str) -> str:
    return f"""
In another terminal:
  tandem chat --address {address}
  tandem generate --address {address} "What is the capital of France?"
  grpcurl -plaintext -d '{{"text": "Once upon a time", "max_tokens": 16}}' \\
    {address} tandem.v1.InferenceService/GenerateStream

Ctrl-C stops both.
"""
