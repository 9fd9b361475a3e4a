"""Records what host and device did in a number of steps, as a Chrome trace-event file.

The file opens in Perfetto or chrome://tracing: one lane for the engine loop's work, one
for the device, so that the overlap of the two can be seen.
"""

import gzip
import json
from enum import IntEnum


class Lane(IntEnum):
    """Rows of the picture, from the top."""

    HOST = 1
    DEVICE = 2


class StepTrace:
    """Spans in seconds of time.monotonic(); ends with `num_steps` device steps."""

    def __init__(self, call_id: int, num_steps: int, expires_at: float) -> None:
        self.call_id = call_id
        # A quiet worker must answer, too.
        self.expires_at = expires_at
        self._steps_left = num_steps
        self._events: list[dict[str, object]] = [
            _metadata("process_name", 0, "tandem worker"),
            _metadata("thread_name", Lane.HOST, "host"),
            _metadata("thread_name", Lane.DEVICE, "device"),
        ]

    @property
    def is_complete(self) -> bool:
        return self._steps_left <= 0

    def add_host(self, name: str, started_at: float, finished_at: float, **args: int) -> None:
        self._add(Lane.HOST, name, started_at, finished_at, args)

    def add_device(self, started_at: float, finished_at: float, **args: int) -> None:
        """One step, as the engine reports it; counts towards the end."""
        self._add(Lane.DEVICE, "step", started_at, finished_at, args)
        self._steps_left -= 1

    def to_json_gz(self) -> bytes:
        document = {"displayTimeUnit": "ms", "traceEvents": self._events}
        return gzip.compress(json.dumps(document).encode())

    def _add(
        self, lane: Lane, name: str, started_at: float, finished_at: float, args: dict[str, int]
    ) -> None:
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": int(lane),
                "ts": started_at * 1e6,
                "dur": (finished_at - started_at) * 1e6,
                "args": args,
            }
        )


def _metadata(kind: str, lane: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": int(lane), "args": {"name": name}}
