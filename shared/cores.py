"""How many cores this process may keep busy."""

import math
import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """At least 1: those of its affinity, and no more than its container's quota, rounded up.

    A quota does not show in the affinity: a container that may use two of 64 cores sees 64.
    Inside one, `cgroup` has the container's own limits, in the files of either version.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """In cores; None: no limit, or none that can be read."""
    try:
        if (unified := cgroup / "cpu.max").exists():
            quota, period = unified.read_text().split()
        else:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        # `max` is no number; version 1 has -1.
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
