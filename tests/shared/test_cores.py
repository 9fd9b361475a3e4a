"""Cores are counted by what this process may use, not by what the machine has."""

import os
from pathlib import Path

import pytest

from shared.cores import usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000\n", ALL),
        ("50000 100000\n", 1),
        ("100000 100000\n", 1),
        ("100001 100000\n", min(2, ALL)),
        ("200000 100000\n", min(2, ALL)),
        ("6400000 100000\n", min(64, ALL)),
        ("", ALL),
        ("100000 0\n", ALL),
    ],
)
def test_a_container_s_quota_bounds_the_cores(tmp_path: Path, content: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, ALL), (150_000, min(2, ALL)), (20_000, 1)])
def test_a_quota_of_the_first_cgroup_version_counts_as_well(
    tmp_path: Path, quota: int, cores: int
) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_container_the_affinity_counts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    assert usable_cores(tmp_path / "none") == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, before)
