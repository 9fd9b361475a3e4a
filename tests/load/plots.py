"""The report's pictures. Needs matplotlib, so nothing imports this before they are drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.load.sweep import Level

_COLORS = ("#2f6fb2", "#e08e2b", "#d64545", "#3f7f6e")


def draw(levels: Sequence[Level], folder: Path, title: str) -> list[Path]:
    """Writes the PNGs and tells their names."""
    at = [level.concurrency for level in levels]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (rate, calls), (ttft, itl) = figure.subplots(2, 2)
    clients = [level.clients for level in levels]
    _lines(
        rate,
        at,
        {
            "our clients": [run.tokens_per_s for run in clients],
            "ghz": [level.ghz_tokens_per_s for level in levels],
        },
        title="Throughput",
        unit="tokens/s",
    )
    _lines(
        calls,
        at,
        {
            f"p{percent}": [level.ghz.latency_ms.get(percent, float("nan")) for level in levels]
            for percent in (50, 95, 99)
        },
        title="Whole call, by ghz",
        unit="ms",
    )
    _lines(
        ttft,
        at,
        {
            "p50": [run.ttft_p50_ms for run in clients],
            "p99": [run.ttft_p99_ms for run in clients],
        },
        title="Time to first token, by our clients",
        unit="ms",
    )
    _lines(
        itl,
        at,
        {
            "p50": [run.itl_p50_ms for run in clients],
            "p99": [run.itl_p99_ms for run in clients],
        },
        title="Between messages, by our clients",
        unit="ms",
    )
    path = folder / "concurrency.png"
    figure.savefig(path, dpi=120)
    return [path]


def _lines(
    axes: Axes, at: Sequence[int], lines: Mapping[str, Sequence[float]], *, title: str, unit: str
) -> None:
    for color, (name, values) in zip(_COLORS, lines.items(), strict=False):
        axes.plot(at, values, marker="o", color=color, label=name)
    axes.set_title(title, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(level) for level in at])
    axes.minorticks_off()
    axes.set_xlabel("streams at once")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
