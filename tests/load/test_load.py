"""`make load` runs, judges and reports; what it says of ghz where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.load.__main__ import RUNS
from tests.load.ghz import CONFIGS, INSTALL, find_ghz, parse_result, read_config, seconds
from tests.load.report import LoadReport


def load(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.load", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
    )


@pytest.mark.skipif(find_ghz() is None, reason=f"ghz is not installed: {INSTALL}")
def test_a_quick_run_ends_well_and_leaves_its_report(tmp_path: Path) -> None:
    ran = load("--echo", "--quick", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["faults"] == 0
    assert figures["runs"] == len(RUNS)
    assert all(calls_per_s > 0 for calls_per_s in figures["calls_per_s"].values())
    page = (tmp_path / "report.md").read_text()
    assert "| cancel storm | GenerateStream | 16 |" in page
    assert "Every call ended as it should" in page
    assert (tmp_path / "concurrency.png").read_bytes().startswith(b"\x89PNG")


def test_without_ghz_it_says_how_to_get_it(tmp_path: Path) -> None:
    bare = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
    ran = load("--echo", "--quick", environment=bare)
    assert ran.returncode == 2
    assert INSTALL in " ".join(ran.stderr.split())


def test_every_configuration_is_run_and_bounded_in_time() -> None:
    names = {path.stem for path in CONFIGS.glob("*.json")}
    assert names == {*RUNS, "sweep"}
    for name in names:
        config = read_config(name)
        assert config["call"].startswith("tandem.v1.InferenceService.Generate")
        assert 0 < seconds(config["timeout"]) <= 60
        assert ("total" in config) is not ("duration" in config)
        assert seconds(config.get("duration", "1s")) <= 10


@pytest.mark.parametrize(
    ("name", "statuses", "is_good"),
    [
        ("steady", {"OK": 9}, True),
        ("steady", {"OK": 9, "Unavailable": 1}, False),
        ("steady", {}, False),
        ("cancel_storm", {"Canceled": 9}, True),
        ("cancel_storm", {"Canceled": 9, "OK": 1}, False),
        ("cancel_storm", {"Canceled": 9, "Internal": 1}, False),
    ],
)
def test_only_the_right_status_is_good(name: str, statuses: dict[str, int], is_good: bool) -> None:
    result: dict[str, Any] = {"total": 2e9, "statusCodeDistribution": statuses}
    report = LoadReport("a model")
    report.add_run(parse_result(read_config(name), result))
    assert (not report.faults) is is_good
    assert report.figures()["faults"] == len(report.faults)
