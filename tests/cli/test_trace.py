"""`tandem trace` on a live worker, and what it makes of a recording."""

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.cli.trace import compare
from gateway.cli.trace_file import TraceError, load_trace, parse_trace, with_about
from gateway.cli.trace_picture import choose_window, draw_trace
from tests.cli.terminal import tandem
from worker.trace import StepTrace

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def recording(
    num_steps: int = 20, *, step_ms: float = 5.0, gap_ms: float = 0.0, rows: Sequence[int] = (8,)
) -> bytes:
    """Steps back to back but for a gap; each planned, launched and committed in 1 ms in all."""
    trace = StepTrace(call_id=1, num_steps=num_steps, expires_at=1e9)
    at = 100.0
    for step in range(num_steps):
        num_rows = rows[step % len(rows)]
        sizes = {"step": step, "rows": num_rows, "tokens": num_rows}
        trace.add_host("plan", at, at + 0.0004, **sizes)
        trace.add_host("launch", at + 0.0004, at + 0.0006, **sizes)
        end = at + (gap_ms + step_ms) / 1e3
        trace.add_host("wait", at + 0.0006, end, **sizes)
        trace.add_host("commit", end, end + 0.0006, **sizes)
        trace.add_device(end - step_ms / 1e3, end, step=step)
        at = end
    return trace.to_json_gz()


def size_of(picture: Path) -> tuple[int, int]:
    content = picture.read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_the_figures_are_those_of_the_spans() -> None:
    trace = parse_trace(recording(gap_ms=1.0), "made here")
    steps = trace.full_decode_steps()
    assert steps == list(range(1, 20))
    assert trace.interval_ms(steps) == pytest.approx(6.0, abs=1e-3)
    assert trace.host_ms(steps) == pytest.approx(1.0, abs=1e-3)
    assert trace.idle_ratio(steps) == pytest.approx(1 / 6, abs=1e-3)


def test_steps_that_are_not_full_do_not_count() -> None:
    trace = parse_trace(recording(9, rows=(8, 8, 2)), "made here")
    assert trace.full_decode_steps() == [1, 4, 7]


def test_the_window_is_eight_full_steps() -> None:
    trace = parse_trace(recording(20, rows=[1] * 6 + [8] * 10 + [2] * 4), "made here")
    window = choose_window(trace)
    inside = [s.span.step for s in trace.steps if window.begin <= s.span.begin < window.end]
    assert [step for step in inside if trace.steps[step].num_rows == 8][:8] == inside[:8]


@pytest.mark.parametrize("num_steps", [1, 2, 5, 300])
def test_a_recording_of_any_length_can_be_drawn(num_steps: int, tmp_path: Path) -> None:
    picture = tmp_path / "trace.png"
    draw_trace(parse_trace(recording(num_steps), "made here"), picture)
    width, height = size_of(picture)
    assert width > height > 400


def test_two_recordings_are_drawn_in_one_picture(tmp_path: Path) -> None:
    on, off = tmp_path / "on.json.gz", tmp_path / "off.json.gz"
    on.write_bytes(with_about(recording(), {"overlap": True, "model": "m"}))
    off.write_bytes(with_about(recording(gap_ms=2.0), {"overlap": False, "model": "m"}))
    assert load_trace(on).overlap is True
    compare(on, off, tmp_path / "both.png")
    assert size_of(tmp_path / "both.png")[0] > 1000


@pytest.mark.parametrize(
    "content",
    [b"", b"text", gzip.compress(b"[]"), gzip.compress(json.dumps({"a": 1}).encode())],
)
def test_a_file_that_is_no_trace_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"other.gz is no trace"):
        load_trace(path)


async def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.json.gz")
    run = await tandem("trace", "--compare", missing, missing)
    assert run.code == 1
    assert run.err == f"error: {missing}: No such file or directory\n"
