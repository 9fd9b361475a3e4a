"""Several processes count, one endpoint adds them up."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from shared.merged_metrics import FOLDER_VARIABLE, forget_gauges, merged_registry

# Counts as a gateway process does, says so, and lives until its stdin ends.
PROGRAM = """
import sys
from prometheus_client import CollectorRegistry
from shared.merged_metrics import count_in_files
from shared.metrics import GatewayMetrics

slot, requests, live, workers = map(int, sys.argv[1:])
count_in_files(slot)
metrics = GatewayMetrics(CollectorRegistry())
metrics.generations.requests.labels("Generate", "EOS").inc(requests)
metrics.hop_lag.observe(0.0045)
metrics.live_requests.set(live)
metrics.workers_ready.set(workers)
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def counting(folder: Path, slot: int, requests: int, live: int, workers: int) -> Iterator[None]:
    """A process that has counted, and lives during the block."""
    arguments = map(str, (slot, requests, live, workers))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={FOLDER_VARIABLE: str(folder), "PYTHONPATH": ":".join(sys.path)},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"counted\n"
        yield


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


REQUESTS = 'tandem_requests_total{method="Generate",outcome="EOS"}'


@pytest.fixture
def registry(tmp_path: Path) -> CollectorRegistry:
    return merged_registry(tmp_path)


def test_counts_and_live_requests_are_sums_and_ready_workers_the_least(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    with counting(tmp_path, 0, 3, 7, 2), counting(tmp_path, 1, 4, 5, 1):
        metrics = scrape(registry)
    assert metrics[REQUESTS] == 7
    assert metrics["tandem_requests_live"] == 12
    assert metrics["tandem_workers_ready"] == 1
    assert metrics["tandem_worker_hop_lag_seconds_count"] == 2
    assert metrics['tandem_worker_hop_lag_seconds_bucket{le="0.004"}'] == 0
    assert metrics['tandem_worker_hop_lag_seconds_bucket{le="0.006"}'] == 2


def test_of_a_dead_process_the_counts_remain_and_nothing_else(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    with counting(tmp_path, 0, 3, 7, 2):
        with counting(tmp_path, 1, 4, 5, 0):
            pass
        forget_gauges(tmp_path, 1)
        metrics = scrape(registry)
    assert metrics[REQUESTS] == 7
    assert (metrics["tandem_requests_live"], metrics["tandem_workers_ready"]) == (7, 2)


def test_a_successor_counts_on_in_the_same_files(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    with counting(tmp_path, 0, 3, 7, 1):
        pass
    files = set(tmp_path.iterdir())
    forget_gauges(tmp_path, 0)
    with counting(tmp_path, 0, 4, 2, 1):
        metrics = scrape(registry)
    assert metrics[REQUESTS] == 7
    assert metrics["tandem_requests_live"] == 2
    assert set(tmp_path.iterdir()) == files
