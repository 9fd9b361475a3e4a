"""How long the idle threads of a step spin. Knows nothing of torch."""

from collections.abc import MutableMapping

# Iterations, some 30 µs: over the small operations between two matrix products of a step.
# libgomp's own 300,000 have a thread that waits for one the kernel has put aside burn the
# rest of its time slice. SmolLM2 at 16 rows on 2 cores, alone: 27 ms a step with libgomp's
# number, 28 ms with this; beside five busy processes 1,000 ms and 85 ms.
_SPIN_COUNT = "2000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Sets what libgomp reads when it is loaded, so before torch is; the user's word counts."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
