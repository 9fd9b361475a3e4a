"""`make soak`: faults of every kind at random, under load, for as long as it is told to.

    python -m tests.faults.soak                          ten minutes
    python -m tests.faults.soak --minutes 2 --seed 7     the same faults again

First many random disconnects, through which memory must stay flat; then rounds of load with
a fault amid it, each followed by a look at whether everything is as it was. Ends with 0 when
every request had one ending that its fault excuses, every echo was right, and every page,
row and megabyte came back; with 1 when not. The last line is JSON.
"""

import argparse
import asyncio
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.cli.terminal import stderr_console, write_error
from shared import bench_report
from tests.faults.field import Field, running_field
from tests.faults.kinds import KINDS, disconnects
from tests.faults.ledger import Ledger
from tests.faults.rounds import Round, run_round
from worker.checkpoint.open import default_cache_dir, open_checkpoint
from worker.config import BUILT_IN_MODEL

# So few that requests are preempted again and again.
_FEW_PAGES = ("--kv-pages", "200")
# By process, from its first quiet moment; allocators and caches need a little.
_MOST_GROWTH_MIB = 48.0
_MOST_GROWTH_BY_DISCONNECTS_MIB = 24.0
# Beyond the time asked for: the last round, and what it takes to come back.
_MARGIN_S = 180.0

Memory = Mapping[tuple[str, int], float]


@dataclass(slots=True)
class Soak:
    """What happened so far."""

    seed: int
    num_disconnects: int
    ledger: Ledger = field(default_factory=Ledger)
    rounds: list[Round] = field(default_factory=list)
    # By process: when it was first quiet, and last.
    first_mib: dict[tuple[str, int], float] = field(default_factory=dict)
    last_mib: dict[tuple[str, int], float] = field(default_factory=dict)
    # Of all processes together, when they were first quiet.
    start_mib: float = 0.0

    def add_memory(self, memory: Memory, most_growth_mib: float) -> None:
        """Notes it, and whether a process grew by more than it may."""
        for name, mib in memory.items():
            grown = mib - self.first_mib.setdefault(name, mib)
            if grown > most_growth_mib:
                self.ledger.violate(f"{name[0]} (pid {name[1]}) grew by {grown:.0f} MiB")
        self.last_mib = dict(memory)
        self.start_mib = self.start_mib or sum(memory.values())

    def add_round(self, result: Round) -> None:
        self.rounds.append(result)
        self.add_memory(result.memory_mib, _MOST_GROWTH_MIB)
        if not result.outcomes["OK"]:
            self.ledger.violate(f"{result.kind}: no request was served")

    def figures(self) -> Mapping[str, object]:
        """For the last line."""
        last = self.rounds[-1] if self.rounds else None
        return {
            "seed": self.seed,
            "requests": self.ledger.num_requests,
            "outcomes": dict(sorted(self.ledger.outcomes.items())),
            "rounds": len(self.rounds),
            "faults": dict(sorted(Counter(r.kind for r in self.rounds).items())),
            "disconnects": self.num_disconnects,
            "settle_max_s": round(max((r.settle_s for r in self.rounds), default=0.0), 2),
            "preemptions_max": max((r.preemptions for r in self.rounds), default=0),
            "rss_start_mib": round(self.start_mib, 1),
            "rss_end_mib": round(sum(self.last_mib.values()), 1),
            "pages": f"{last.pages_back} of {last.pages_total}" if last else "",
            "violations": len(self.ledger.violations),
        }


async def soak(minutes: float, seed: int, num_disconnects: int) -> int:
    """Returns the exit code."""
    state = Soak(seed, num_disconnects)
    console = stderr_console()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as name:
        folder = Path(name)
        tokenizer = _tokenizer(folder / "tokenizer")
        try:
            async with asyncio.timeout(60 * minutes + _MARGIN_S):
                async with running_field(folder, tokenizer, _FEW_PAGES) as services:
                    with _progress(console) as progress:
                        await _run(services, state, 60 * minutes, progress)
        except (AssertionError, TimeoutError) as error:
            state.ledger.violate(f"{type(error).__name__}: {error}")
    _print(state)
    for violation in state.ledger.violations:
        write_error(console, violation)
    bench_report.result(state.figures())
    return 1 if state.ledger.violations else 0


async def _run(services: Field, state: Soak, length_s: float, progress: Progress) -> None:
    rng = random.Random(state.seed)
    until = time.monotonic() + length_s
    shown = progress.add_task("disconnects", total=length_s, requests=0)
    await _disconnect(services, state, rng)
    # Every kind once before any comes again.
    order = list(KINDS)
    rng.shuffle(order)
    index = 0
    # One at least, however long the disconnects took.
    while not index or time.monotonic() < until:
        kind = order[index] if index < len(order) else rng.choice(KINDS)
        index += 1
        _show(progress, shown, kind.name, state, length_s - (until - time.monotonic()))
        num_clients = rng.choice((8, 24, 48))
        result = await run_round(services, kind, state.ledger, rng, num_clients=num_clients)
        state.add_round(result)
        if not progress.console.is_terminal:
            progress.console.print(f"{kind.name}: {_outcomes(result.outcomes)}", markup=False)


async def _disconnect(services: Field, state: Soak, rng: random.Random) -> None:
    """A tenth beforehand, so that what is made once is made."""
    if not state.num_disconnects:
        return
    await disconnects(services, state.ledger, rng, total=state.num_disconnects // 10)
    await services.settle()
    state.add_memory(services.memory_mib(), _MOST_GROWTH_BY_DISCONNECTS_MIB)
    await disconnects(services, state.ledger, rng, total=state.num_disconnects)
    await services.settle()
    state.add_memory(services.memory_mib(), _MOST_GROWTH_BY_DISCONNECTS_MIB)


def _tokenizer(folder: Path) -> Path:
    """The built-in model's, which a worker with the echo engine opens in a moment."""
    checkpoint = open_checkpoint(
        BUILT_IN_MODEL, cache_dir=default_cache_dir(os.environ), progress=lambda _: None
    )
    folder.mkdir()
    for name, content in checkpoint.tokenizer(lambda _: None).files.items():
        (folder / name).write_bytes(content)
    return folder


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.fields[requests]:,} requests"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show(progress: Progress, shown: TaskID, what: str, state: Soak, passed_s: float) -> None:
    requests = state.ledger.num_requests
    progress.update(shown, description=what, completed=passed_s, requests=requests)


def _print(state: Soak) -> None:
    table = Table(title=f"soak, seed {state.seed}", title_justify="left", title_style="bold")
    for name in ("fault", "rounds", "requests", "endings", "back after, s"):
        table.add_column(name, justify="left" if name in ("fault", "endings") else "right")
    for kind in KINDS:
        rounds = [r for r in state.rounds if r.kind == kind.name]
        if not rounds:
            continue
        outcomes: Counter[str] = sum((r.outcomes for r in rounds), Counter())
        table.add_row(
            kind.name,
            str(len(rounds)),
            f"{outcomes.total():,}",
            _outcomes(outcomes),
            f"{max(r.settle_s for r in rounds):.1f}",
        )
    Console(highlight=False, width=140).print(table)


def _outcomes(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(outcomes.items()))


def main(arguments: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.soak", description="Faults of every kind under load."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, at most 60")
    parser.add_argument("--seed", type=int, help="of the faults and requests; none: drawn")
    parser.add_argument(
        "--disconnects", type=int, default=10_000, help="before the rounds; memory must be flat"
    )
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.minutes <= 60:
        parser.error("--minutes must be above 0 and at most 60")
    seed = secrets.randbelow(1 << 32) if parsed.seed is None else parsed.seed
    bench_report.header(f"soak, seed {seed}")
    return uvloop.run(soak(parsed.minutes, seed, parsed.disconnects))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
