"""What every `tandem bench` ends with."""

import json

from tests.cli.terminal import Run

KEYS = (
    "tokens_per_s",
    "ttft_p50_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "host_step_p50_ms",
    "device_idle_ratio",
)


def last_line(run: Run) -> dict[str, float]:
    """The figures; fails when one of the promised ones is missing."""
    figures: dict[str, float] = json.loads(run.out.splitlines()[-1])
    assert set(KEYS) <= set(figures)
    return figures
