"""How long to wait between attempts to reach a worker, and whether to prefer another."""

import random

# What a client is told of when to try again: by then a worker that was lost is back or
# given up, and a queue has moved.
RETRY_AFTER_MS = 1000


class Backoff:
    """Waits that double up to a limit, with jitter; the first is short."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def next_s(self) -> float:
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._limit_s)
        # Gateways that lost a worker together should not come back in one moment.
        return wait_s * random.uniform(0.75, 1.25)

    def reset(self) -> None:
        self._next_s = self._first_s


class Breaker:
    """Opens for a while after several faults in a row; knows nothing of clocks."""

    def __init__(self, threshold: int, cool_down_s: float) -> None:
        self._threshold = threshold
        self._cool_down_s = cool_down_s
        self._faults = 0
        self._open_until = 0.0

    def is_open(self, now: float) -> bool:
        return now < self._open_until

    def record_success(self) -> None:
        self._faults = 0

    def record_fault(self, now: float) -> bool:
        """A fault of the server's; a client's error is none. Returns whether that opened it."""
        was_open = self.is_open(now)
        self._faults += 1
        if self._faults >= self._threshold:
            self._open_until = now + self._cool_down_s
        return not was_open and self.is_open(now)
