"""`make load`: starts a worker and a gateway, loads them with ghz, and writes a report.

    python -m tests.load             the built-in model on the CPU, about two minutes
    python -m tests.load --echo      the echo engine: what the services cost without a model
    python -m tests.load --quick     a second for each run, with --echo for CI

Runs are the ghz configurations in `tests/load/configs`. Ends with 0 when every call ended
as it should and every page was back after each run, 1 when not, 2 without ghz.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.bench_pool import BenchError
from gateway.cli.pair import Pair, free_address
from gateway.cli.terminal import stderr_console, write_error
from gateway.cli.up import UpOptions, run_pair
from shared import bench_report
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.integration.pair import Client
from tests.load.ghz import INSTALL, GhzError, find_ghz, read_config, run_ghz
from tests.load.report import LoadReport, write_page
from tests.load.sweep import run_level

RUNS = (
    "steady",
    "burst",
    "many_connections",
    "single_connection",
    "unary",
    "long_prompts",
    "cancel_storm",
)
EXIT_NO_GHZ = 2

_REPOSITORY = Path(__file__).resolve().parents[2]
# Requests that were cut a moment ago are still on their way out.
_CLEAN_TIMEOUT_S = 10.0
_QUICK_DURATION = "1s"
_QUICK_TOTAL = 32


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load, and how long."""

    ghz: Path
    is_echo: bool
    is_quick: bool
    folder: Path

    @property
    def levels(self) -> Sequence[int]:
        """Streams at once of the sweep."""
        if self.is_quick:
            return (1, 8)
        return (1, 4, 16, 64, 256) if self.is_echo else (1, 2, 4, 8, 16)

    @property
    def requests_each(self) -> int:
        """Of each of our own clients."""
        return 20 if self.is_echo and not self.is_quick else 3

    def config(self, name: str) -> dict[str, Any]:
        """A run's ghz configuration, cut short where asked for."""
        config = read_config(name)
        if self.is_quick:
            config |= {"duration": _QUICK_DURATION} if "duration" in config else {}
            if "total" in config:
                config |= {"total": _QUICK_TOTAL, "concurrency": _QUICK_TOTAL}
        return config


async def load_pair(options: LoadOptions) -> int:
    """Starts the pair, runs everything, writes the report. Returns the exit code."""
    console = stderr_console()
    report: LoadReport | None = None

    async def work(pair: Pair) -> None:
        nonlocal report
        async with Client(pair.gateway.address) as client:
            model = await client.stub.GetModel(pb.GetModelRequest())
            report = LoadReport(
                f"the echo engine with the tokenizer of {model.model}"
                if options.is_echo
                else f"{model.model}, {model.dtype}, {model.device}"
            )
            try:
                await _run_all(options, pair.gateway.address, client, report)
            except (GhzError, BenchError) as error:
                report.faults.append(str(error))

    up = UpOptions(
        gateway_address=free_address(),
        worker_address=free_address(),
        worker_arguments=("--engine", "echo", "--echo-step-ms", "1") if options.is_echo else (),
        shows_logs=False,
    )
    code = await run_pair(up, console, work)
    if code or report is None:
        return code or 1
    _write(options, report)
    for fault in report.faults:
        write_error(console, fault)
    bench_report.result({**report.figures(), "report": str(options.folder / "report.md")})
    return 1 if report.faults else 0


async def _run_all(options: LoadOptions, address: str, client: Client, report: LoadReport) -> None:
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
    console = stderr_console()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        shown = progress.add_task("", total=len(RUNS) + len(options.levels))
        for name in RUNS:
            progress.update(shown, description=name.replace("_", " "))
            run = await run_ghz(options.ghz, options.config(name), address, options.folder)
            report.add_run(run)
            await _check_clean(client, report, run.name)
            progress.advance(shown)
        for concurrency in options.levels:
            progress.update(shown, description=f"{concurrency} at once")
            level = await run_level(
                options.ghz,
                options.config("sweep"),
                address,
                options.folder,
                concurrency=concurrency,
                requests_each=options.requests_each,
            )
            report.add_level(level)
            await _check_clean(client, report, level.ghz.name)
            progress.advance(shown)


async def _check_clean(client: Client, report: LoadReport, name: str) -> None:
    """Nothing runs and nothing waits, and every page is free or cached."""
    try:
        await client.assert_clean(timeout_s=_CLEAN_TIMEOUT_S)
    except AssertionError as error:
        report.faults.append(f"after {name}: {error}")


def _write(options: LoadOptions, report: LoadReport) -> None:
    pictures: Sequence[Path] = ()
    note = ""
    if find_spec("matplotlib") is None:
        note = 'No pictures: matplotlib is not installed (`pip install "tandem[plot]"`).'
    elif report.levels:
        # Only where there is something to draw it with.
        from tests.load.plots import draw  # noqa: PLC0415

        pictures = draw(report.levels, options.folder, f"Load on {report.model}")
    write_page(report, pictures, note, options.folder / "report.md")


def main(arguments: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.load", description="Loads a pair with ghz and writes a report."
    )
    parser.add_argument("--echo", action="store_true", help="the echo engine, without a model")
    parser.add_argument("--quick", action="store_true", help="a second for each run")
    parser.add_argument(
        "--out", type=Path, default=_REPOSITORY / "build/load", help="folder of the report"
    )
    parsed = parser.parse_args(arguments)
    ghz = find_ghz()
    if ghz is None:
        write_error(stderr_console(), f"ghz is not installed; this does it: {INSTALL}")
        return EXIT_NO_GHZ
    parsed.out.mkdir(parents=True, exist_ok=True)
    bench_report.header("load")
    options = LoadOptions(ghz, parsed.echo, parsed.quick, parsed.out)
    return asyncio.run(load_pair(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
