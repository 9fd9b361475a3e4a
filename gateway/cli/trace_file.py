"""A recording of steps as `tandem trace` keeps it: read, written, and what it says.

The file is a Chrome trace-event document, which Perfetto opens. Knows nothing of pictures.
"""

import gzip
import json
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Of the fullest step's rows: what counts as a full batch.
FULL_BATCH = 7 / 8

_US_PER_MS = 1000.0
# As worker/trace.py numbers its lanes.
_HOST, _DEVICE = 1, 2


class TraceError(Exception):
    """A file that is no recording of ours, or one that shows nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one lane did, in milliseconds since the recording began."""

    name: str
    begin: float
    end: float
    # -1: not for one step.
    step: int = -1

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Step:
    """One step at the device and what it cost the host."""

    span: Span
    num_rows: int
    num_tokens: int
    # Plan and commit; None where the recording lacks one of them.
    host_ms: float | None

    @property
    def is_decode(self) -> bool:
        return 0 < self.num_rows == self.num_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans in order of their begin; `about` says what was recorded: model, overlap, …"""

    host: Sequence[Span]
    steps: Sequence[Step]
    about: Mapping[str, object]

    @property
    def overlap(self) -> bool | None:
        """Whether the overlap loop ran; None where the file does not say."""
        value = self.about.get("overlap")
        return value if isinstance(value, bool) else None

    def full_decode_steps(self) -> list[int]:
        """Steps of decode rows alone, at a full batch, that follow another such step.

        Of a recording without any: every step but the first.
        """
        decode = [i for i, step in enumerate(self.steps) if step.is_decode]
        most_rows = max((self.steps[i].num_rows for i in decode), default=0)
        full = {i for i in decode if self.steps[i].num_rows >= FULL_BATCH * most_rows}
        found = [i for i in sorted(full) if i - 1 in full]
        return found or list(range(1, len(self.steps)))

    def idle_ratio(self, indices: Sequence[int]) -> float | None:
        """Share of the time from end to end of these steps in which the device did nothing."""
        spans = [(self.steps[i - 1].span, self.steps[i].span) for i in indices]
        whole = sum(this.end - last.end for last, this in spans)
        idle = sum(max(0.0, this.begin - last.end) for last, this in spans)
        return idle / whole if whole > 0 else None

    def interval_ms(self, indices: Sequence[int]) -> float | None:
        """Median time from the end of a step to the end of the next."""
        return _median([self.steps[i].span.end - self.steps[i - 1].span.end for i in indices])

    def host_ms(self, indices: Sequence[int]) -> float | None:
        """Median of plan plus commit."""
        known = [self.steps[i].host_ms for i in indices]
        return _median([value for value in known if value is not None])


def parse_trace(trace_json_gz: bytes, source: str) -> Trace:
    """`source` is for the words of a TraceError."""
    try:
        document = json.loads(gzip.decompress(trace_json_gz))
        events = [event for event in document["traceEvents"] if event["ph"] == "X"]
        begin = min((event["ts"] for event in events), default=0.0)
        lanes = {lane: _spans(events, lane, begin) for lane in (_HOST, _DEVICE)}
        sizes = {
            event["args"]["step"]: (event["args"]["rows"], event["args"]["tokens"])
            for event in events
            if event["tid"] == _HOST and "step" in event["args"]
        }
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{source} is no trace of tandem's: {error}") from error
    about = document.get("otherData", {})
    return Trace(lanes[_HOST], _steps(lanes[_HOST], lanes[_DEVICE], sizes), about)


def load_trace(path: Path) -> Trace:
    """Raises TraceError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    return parse_trace(content, str(path))


def with_about(trace_json_gz: bytes, about: Mapping[str, object]) -> bytes:
    """The same file with what is known of the recording written into it."""
    document = json.loads(gzip.decompress(trace_json_gz))
    document["otherData"] = dict(about)
    return gzip.compress(json.dumps(document).encode())


def _spans(events: Sequence[Mapping[str, object]], lane: int, begin: float) -> list[Span]:
    spans = []
    for event in events:
        if event["tid"] != lane:
            continue
        at, length, args = event["ts"], event["dur"], event["args"]
        assert isinstance(at, int | float) and isinstance(length, int | float)
        assert isinstance(args, dict)
        start = (at - begin) / _US_PER_MS
        name, step = str(event["name"]), int(args.get("step", -1))
        spans.append(Span(name, start, start + length / _US_PER_MS, step))
    return sorted(spans, key=lambda span: span.begin)


def _steps(
    host: Sequence[Span], device: Sequence[Span], sizes: Mapping[int, tuple[int, int]]
) -> list[Step]:
    costs: dict[str, dict[int, float]] = {"plan": {}, "commit": {}}
    for span in host:
        if span.name in costs:
            costs[span.name][span.step] = span.length
    steps = []
    for span in device:
        num_rows, num_tokens = sizes.get(span.step, (0, 0))
        plan, commit = costs["plan"].get(span.step), costs["commit"].get(span.step)
        host_ms = None if plan is None or commit is None else plan + commit
        steps.append(Step(span, num_rows, num_tokens, host_ms))
    return steps


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
