"""The report of a load run: a page with its tables, and the figures of the last line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.bench_report import describe, rounded, shown
from tests.load.ghz import GhzRun
from tests.load.sweep import Level


@dataclass(slots=True)
class LoadReport:
    """What was run so far."""

    model: str
    runs: list[GhzRun] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    # Each thing that is not as it must be.
    faults: list[str] = field(default_factory=list)

    def add_run(self, run: GhzRun) -> None:
        """Keeps a run and judges it."""
        self.runs.append(run)
        if not run.is_good:
            self.faults.append(f"{run.name}: {_statuses(run)}, where only {run.expected} is right")

    def add_level(self, level: Level) -> None:
        """Keeps a step of the sweep and judges both halves."""
        self.levels.append(level)
        if not level.ghz.is_good:
            self.faults.append(f"{level.ghz.name}: {_statuses(level.ghz)}")
        failures = level.clients.failures
        if failures:
            self.faults.append(
                f"{level.ghz.name}: {len(failures)} of our clients' requests failed, "
                f"the first with {failures[0]}"
            )

    def figures(self) -> Mapping[str, object]:
        """For the last line."""
        best = max((level.clients.tokens_per_s for level in self.levels), default=None)
        first = self.levels[0].clients if self.levels else None
        return {
            "model": self.model,
            "runs": len(self.runs),
            "calls": sum(run.num_calls for run in (*self.runs, *(v.ghz for v in self.levels))),
            "faults": len(self.faults),
            "best_tokens_per_s": rounded(best, 1),
            "ttft_p50_ms": rounded(first.ttft_p50_ms if first else None, 2),
            "itl_p50_ms": rounded(first.itl_p50_ms if first else None, 2),
            "calls_per_s": {run.name: rounded(run.calls_per_s, 2) for run in self.runs},
        }


def write_page(report: LoadReport, pictures: Sequence[Path], note: str, path: Path) -> None:
    """Writes the page; pictures lie beside it."""
    lines = [f"# Load on {report.model}", ""]
    lines += [f"- {name}: {value}" for name, value in describe().items()]
    lines += ["", "## Runs of ghz", "", *_table(RUN_COLUMNS, [_run_row(r) for r in report.runs])]
    if report.levels:
        rows = [_level_row(level) for level in report.levels]
        lines += ["", "## By streams at once", "", *_table(LEVEL_COLUMNS, rows)]
        lines += ["", "ghz times whole calls; first tokens and gaps are our own clients'."]
    lines += [f"\n![{picture.stem}]({picture.name})" for picture in pictures]
    if note:
        lines += ["", note]
    lines += ["", "## Verdict", ""]
    if report.faults:
        lines += [f"- {fault}" for fault in report.faults]
    else:
        lines += ["Every call ended as it should, and after every run all pages were back."]
    path.write_text("\n".join(lines) + "\n")


RUN_COLUMNS = (
    "run",
    "call",
    "at once",
    "connections",
    "calls",
    "calls/s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "ended",
)
LEVEL_COLUMNS = (
    "at once",
    "tokens/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "gap p50 ms",
    "gap p99 ms",
    "ghz tokens/s",
    "ghz p50 ms",
    "ghz p99 ms",
)


def _run_row(run: GhzRun) -> Sequence[str]:
    return (
        run.name,
        run.call,
        str(run.concurrency),
        str(run.connections),
        f"{run.num_calls:,}",
        f"{run.calls_per_s:,.1f}",
        *(_ms(run.latency_ms.get(percent)) for percent in (50, 95, 99)),
        _statuses(run),
    )


def _level_row(level: Level) -> Sequence[str]:
    clients = level.clients
    return (
        str(level.concurrency),
        f"{clients.tokens_per_s:,.0f}",
        _ms(clients.ttft_p50_ms),
        _ms(clients.ttft_p99_ms),
        _ms(clients.itl_p50_ms),
        _ms(clients.itl_p99_ms),
        f"{level.ghz_tokens_per_s:,.0f}",
        _ms(level.ghz.latency_ms.get(50)),
        _ms(level.ghz.latency_ms.get(99)),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ruler, *rows)]


def _statuses(run: GhzRun) -> str:
    return ", ".join(f"{count:,} {code}" for code, count in run.statuses.items()) or "no calls"


def _ms(value: float | None) -> str:
    return shown(value, "", 1) if value is not None else "–"
