"""How many threads a step takes, and how long the idle ones spin. Knows nothing of torch."""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")

# Iterations, some 30 µs: over the small operations between two matrix products of a step.
# libgomp's own 300,000 have a thread that waits for one the kernel has put aside burn the
# rest of its time slice. SmolLM2 at 16 rows on 2 cores, alone: 27 ms a step with libgomp's
# number, 28 ms with this; beside five busy processes 1,000 ms and 85 ms.
_SPIN_COUNT = "2000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Sets what libgomp reads when it is loaded, so before torch is; the user's word counts."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def usable_cores(cgroup_cpu: Path = _CGROUP_CPU) -> int:
    """Cores that this process may run on: by its affinity, and by its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup_cpu.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, max(1, math.ceil(int(quota) / int(period))))
