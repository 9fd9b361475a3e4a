"""One metrics endpoint for several processes of a service.

Each process counts in files of its own, in a folder that they share (prometheus-client's
multiprocess mode); whoever serves the endpoint adds the files up at the scrape.
"""

from pathlib import Path

from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

# Read by prometheus-client from the environment of each process that counts.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def count_in_files(slot: int) -> None:
    """Makes the metrics that this process creates from now on count in files.

    The process that follows another in its slot counts on in the same files: by process
    id, as the library would name them, each one that died would leave some for ever.
    """
    values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]


def merged_registry(folder: Path) -> CollectorRegistry:
    """A registry of what the processes have counted, and of whatever else is put in."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


def forget_gauges(folder: Path, slot: int) -> None:
    """Takes away what a dead process had at this moment; what it counted remains."""
    mark_process_dead(slot, str(folder))  # type: ignore[no-untyped-call]
