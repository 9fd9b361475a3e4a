"""How commands end, as the shell sees it."""

import asyncio
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any

import typer

from gateway.cli.bench_pool import BenchError
from gateway.cli.client import CallError
from gateway.cli.terminal import stderr_console, write_error
from gateway.cli.trace_file import TraceError


class ExitCode(IntEnum):
    """What the shell sees, besides 0."""

    FAILED = 1
    # As shells report a program that Ctrl-C ended.
    INTERRUPTED = 130


def call(work: Coroutine[Any, Any, None]) -> None:
    """Runs a call to its end; a failure is one line on stderr and an exit code."""
    try:
        asyncio.run(work)
    except (CallError, TraceError, BenchError, OSError) as error:
        write_error(stderr_console(), str(error))
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        stderr_console().print("\n[dim]cancelled[/]")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
