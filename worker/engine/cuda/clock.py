"""Device times as time.monotonic() seconds, from CUDA events."""

import time

import torch


class DeviceClock:
    """Chains each step's events to those of the step before.

    An event tells only its distance from another, in float32 milliseconds, so a distance
    from the start of the process would lose microseconds within minutes.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record(stream)
        self._last.synchronize()
        self._last_time = time.monotonic()

    def times(
        self, begin: torch.cuda.Event, end: torch.cuda.Event, *, waited_from: float, now: float
    ) -> tuple[float, float]:
        """Begin and end of a step whose end event was waited for from `waited_from` to `now`."""
        to_begin = self._last.elapsed_time(begin) / 1e3
        to_end = begin.elapsed_time(end) / 1e3
        finished_at = self._last_time + to_begin + to_end
        # The two clocks drift apart; what the host has seen bounds what can be true. A step
        # that had ended before the wait says only that it is not later than now.
        if now - waited_from > 1e-4:
            finished_at = max(finished_at, waited_from)
        finished_at = min(finished_at, now)
        self._last, self._last_time = end, finished_at
        return finished_at - to_end, finished_at
