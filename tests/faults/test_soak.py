"""`make soak`, for a moment: it runs, judges, and tells its seed and figures."""

import json
import subprocess
import sys


def test_a_short_soak_ends_well_and_tells_its_figures() -> None:
    arguments = ("--minutes", "0.02", "--seed", "3", "--disconnects", "40")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert "# soak, seed 3" in ran.stdout
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["seed"] == 3
    assert figures["rounds"] >= 1
    assert figures["violations"] == 0
    assert figures["requests"] == sum(figures["outcomes"].values()) > 44
