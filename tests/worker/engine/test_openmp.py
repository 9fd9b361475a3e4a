"""Threads: no more than the process may use, and none that spins for long."""

import os
from pathlib import Path

import pytest

from worker.engine.openmp import limit_spinning, usable_cores


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000\n", None), ("100000 100000\n", 1), ("50000 100000\n", 1)]
)
def test_a_container_s_quota_bounds_the_cores(
    tmp_path: Path, content: str, cores: int | None
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(content)
    assert usable_cores(path) == (cores or len(os.sched_getaffinity(0)))


def test_without_a_container_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_spinning_is_limited_unless_the_user_has_decided() -> None:
    plain: dict[str, str] = {}
    limit_spinning(plain)
    assert int(plain["GOMP_SPINCOUNT"]) > 0
    for chosen in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        environment = dict(chosen)
        limit_spinning(environment)
        assert environment == chosen
