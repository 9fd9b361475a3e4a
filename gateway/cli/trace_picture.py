"""Draws recordings of steps: what the host did above, what the device did below.

Needs matplotlib, so nothing imports this module before a picture is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gateway.cli.trace_file import Span, Trace

# Steps in the enlarged window.
_WINDOW_STEPS = 8

_INK = "#1f2933"
_MUTED = "#6b7785"
_FRAME = "#d5dbe1"
# Two hues for the two halves of the host's work, grey for what is none, red for the loss.
_COLORS = {
    "plan": "#2f6fb2",
    "launch": "#7fb2e5",
    "commit": "#e08e2b",
    "receive": "#a3adb8",
    "wait": "#eceff2",
    "step": "#3f7f6e",
    "idle": "#d64545",
}
_LABELS = {
    "receive": "receive",
    "plan": "plan N+1",
    "launch": "launch N+1",
    "wait": "wait for N",
    "commit": "commit N",
    "step": "step",
    "idle": "device idle",
}
# Any, because matplotlib types the keys one by one.
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _FRAME,
    "axes.labelcolor": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}
# Heights on the axis: the host's lane above the device's.
_HOST_Y, _DEVICE_Y, _LANE_HEIGHT = 1.0, 0.0, 0.62
_DPI = 150
_WIDTH_IN = 11.0
# Of the axes, and of a letter of a label with the air around it.
_AXES_IN = 0.915 * _WIDTH_IN
_LETTER_IN = 0.075


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a recording, in its milliseconds."""

    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin


def draw_trace(trace: Trace, path: Path) -> None:
    """A few decode steps enlarged, and the whole recording as a strip below."""
    with rc_context(_STYLE):
        figure = _figure(4.3)
        grid = figure.add_gridspec(
            2, 1, height_ratios=(3.2, 1), hspace=0.5, left=0.07, right=0.985, top=0.77, bottom=0.08
        )
        window = choose_window(trace)
        _title(figure, _headline(trace), _subtitle(trace), 0.955)
        _legend(figure, 0.825)
        zoom, strip = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        _draw_lanes(zoom, trace, window, labels=True)
        _draw_strip(strip, trace, window)
        figure.savefig(path, dpi=_DPI)


def draw_comparison(upper: Trace, lower: Trace, path: Path) -> None:
    """The same stretch of time of two recordings, one above the other."""
    with rc_context(_STYLE):
        figure = _figure(5.2)
        grid = figure.add_gridspec(
            2, 1, hspace=0.55, left=0.07, right=0.985, top=0.755, bottom=0.07
        )
        title = f"{_headline(upper)}, {_headline(lower).lower()}"
        _title(figure, title, _subtitle(upper, with_figures=False), 0.965)
        _legend(figure, 0.845)
        windows = [choose_window(trace) for trace in (upper, lower)]
        # As many steps of the slower one as fit: the faster one shows more of them.
        length = max(window.length for window in windows)
        for i, (trace, window) in enumerate(zip((upper, lower), windows, strict=True)):
            axes = figure.add_subplot(grid[i])
            begin = max(0.0, min(window.begin, _end(trace) - length))
            _draw_lanes(axes, trace, Window(begin, begin + length), labels=True)
            axes.set_title(_headline(trace), loc="left", fontweight="bold", fontsize=10, pad=6)
            axes.set_title(_figures(trace), loc="right", fontsize=9, color=_MUTED, pad=6)
        figure.savefig(path, dpi=_DPI)


def choose_window(trace: Trace) -> Window:
    """The stretch of full decode steps in a row whose length is the median of all such."""
    wanted = set(trace.full_decode_steps()) or {0}
    count = min(_WINDOW_STEPS, len(trace.steps))
    stretches = [
        stretch
        for first in range(len(trace.steps) - count + 1)
        if set(stretch := range(first, first + count)) <= wanted
    ]
    if not stretches:
        last = len(trace.steps) - 1
        return _window(trace, range(max(0, last + 1 - count), last + 1))
    stretches.sort(key=lambda stretch: _window(trace, stretch).length)
    return _window(trace, stretches[len(stretches) // 2])


def _window(trace: Trace, steps: range) -> Window:
    """From the end of the step before, if there is one, so that a gap before shows too."""
    first, last = trace.steps[steps[0]].span, trace.steps[steps[-1]].span
    margin = 0.02 * (last.end - first.begin)
    return Window(first.begin - margin, last.end + margin)


def _figure(height_in: float) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _title(figure: Figure, title: str, subtitle: str, y: float) -> None:
    figure.text(0.016, y, title, fontsize=14, fontweight="bold", va="top")
    height = figure.get_size_inches()[1]
    figure.text(0.016, y - 0.31 / height, subtitle, fontsize=9, color=_MUTED, va="top")


def _legend(figure: Figure, y: float) -> None:
    patches = [
        Patch(facecolor=_COLORS[name], edgecolor=_FRAME, linewidth=0.5, label=label)
        for name, label in _LABELS.items()
    ]
    figure.legend(
        handles=patches,
        loc="center left",
        bbox_to_anchor=(0.008, y),
        ncols=len(patches),
        frameon=False,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.6,
        handletextpad=0.5,
        fontsize=8.5,
    )


def _draw_lanes(axes: Axes, trace: Trace, shown: Window, *, labels: bool = False) -> None:
    """Both lanes in the window; the axis counts from its begin."""

    def at(time: float) -> float:
        return time - shown.begin

    axes.set_xlim(0, shown.length)
    axes.set_ylim(_DEVICE_Y - 0.5, _HOST_Y + 0.42)
    axes.set_yticks([_HOST_Y, _DEVICE_Y], ["host", "device"], fontweight="bold")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
    device = [step.span for step in trace.steps]
    gaps = _gaps(device)
    for name in ("wait", "receive", "plan", "launch", "commit"):
        _bars(axes, [s for s in trace.host if s.name == name], shown, at, name, _HOST_Y)
    _bars(axes, device, shown, at, "step", _DEVICE_Y)
    _bars(axes, gaps, shown, at, "idle", _DEVICE_Y)
    if labels:
        waits = [span for span in trace.host if span.name == "wait"]
        _label(axes, device, shown, at, ("step {step}", "{step}"), _DEVICE_Y, "white")
        _label(axes, gaps, shown, at, ("{length:.2f} ms",), _DEVICE_Y, "white")
        _label(axes, waits, shown, at, ("wait for {step}",), _HOST_Y, _MUTED)
        _draw_launches(axes, trace, shown, at)


def _label(
    axes: Axes,
    spans: Sequence[Span],
    shown: Window,
    at: Callable[[float], float],
    forms: Sequence[str],
    y: float,
    color: str,
) -> None:
    """Writes on the spans the longest of the forms that fits on the middle one."""
    visible = [
        Span(span.name, max(span.begin, shown.begin), min(span.end, shown.end), span.step)
        for span in spans
        if span.begin < shown.end and span.end > shown.begin
    ]
    if not visible:
        return
    per_ms = _AXES_IN / shown.length
    room = per_ms * sorted(span.length for span in visible)[len(visible) // 2]
    for form in forms:
        texts = [form.format(step=span.step, length=span.length) for span in visible]
        needed = _LETTER_IN * max(map(len, texts))
        if needed > room and form is not forms[-1]:
            continue
        for span, text in zip(visible, texts, strict=True):
            if span.length * per_ms > needed:
                middle = at((span.begin + span.end) / 2)
                axes.text(middle, y, text, color=color, fontsize=7.5, ha="center", va="center")
        return


def _draw_launches(axes: Axes, trace: Trace, shown: Window, at: Callable[[float], float]) -> None:
    """From the end of each launch to the begin of its step: what overlap looks like."""
    begins = {step.span.step: step.span.begin for step in trace.steps}
    for span in trace.host:
        begin = begins.get(span.step)
        if span.name != "launch" or begin is None:
            continue
        if shown.begin <= span.end and begin <= shown.end:
            axes.annotate(
                "",
                xy=(at(begin), _DEVICE_Y + _LANE_HEIGHT / 2),
                xytext=(at(span.end), _HOST_Y - _LANE_HEIGHT / 2),
                arrowprops={
                    "arrowstyle": "-|>,head_width=0.16,head_length=0.3",
                    "color": _COLORS["launch"],
                    "linewidth": 0.9,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )


def _draw_strip(axes: Axes, trace: Trace, window: Window) -> None:
    """The whole recording, and where the enlarged window lies in it."""
    _draw_lanes(axes, trace, Window(0.0, _end(trace)))
    axes.axvspan(window.begin, window.end, facecolor="none", edgecolor=_INK, linewidth=1.2)
    axes.set_title(
        f"the whole recording, {len(trace.steps)} steps; framed: the part above",
        loc="left",
        fontsize=8.5,
        color=_MUTED,
        pad=4,
    )


def _bars(
    axes: Axes,
    spans: Sequence[Span],
    shown: Window,
    at: Callable[[float], float],
    kind: str,
    y: float,
) -> None:
    """One collection for each kind: a recording may have ten thousand spans."""
    low, high = y - _LANE_HEIGHT / 2, y + _LANE_HEIGHT / 2
    corners = []
    for span in spans:
        begin, end = at(max(span.begin, shown.begin)), at(min(span.end, shown.end))
        if end > begin:
            corners.append([(begin, low), (end, low), (end, high), (begin, high)])
    # Enough that steps back to back can be told apart when enlarged.
    is_dense = len(corners) > 60
    edge = "white" if kind == "step" and not is_dense else "none"
    axes.add_collection(
        PolyCollection(corners, facecolors=_COLORS[kind], edgecolors=edge, linewidths=0.8)
    )


def _gaps(device: Sequence[Span]) -> list[Span]:
    return [
        Span("idle", last.end, this.begin)
        for last, this in zip(device, device[1:], strict=False)
        if this.begin > last.end
    ]


def _end(trace: Trace) -> float:
    return max(span.end for span in (*trace.host, *(step.span for step in trace.steps)))


def _headline(trace: Trace) -> str:
    overlap = trace.overlap
    return "Steps" if overlap is None else f"Overlap {'on' if overlap else 'off'}"


def _subtitle(trace: Trace, *, with_figures: bool = True) -> str:
    about = trace.about
    parts = [str(about[name]) for name in ("model", "dtype", "device") if about.get(name)]
    rows = max((trace.steps[i].num_rows for i in trace.full_decode_steps()), default=0)
    if rows:
        parts.append(f"{rows} rows a step")
    if with_figures:
        parts.append(_figures(trace))
    return "  ·  ".join(parts)


def _figures(trace: Trace) -> str:
    steps = trace.full_decode_steps()
    parts = []
    if (interval := trace.interval_ms(steps)) is not None:
        parts.append(f"{interval:.2f} ms a step")
    if (host := trace.host_ms(steps)) is not None:
        parts.append(f"host plan + commit {host:.2f} ms")
    if (idle := trace.idle_ratio(steps)) is not None:
        parts.append(f"device idle {idle:.1%}")
    return "  ·  ".join(parts)
