"""Device times as time.monotonic() seconds, from CUDA events and the host's own clock."""

import time
from dataclasses import dataclass, field

import torch


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class StepTiming:
    """Events around a step, and when the host had queued its work.

    The begin event fires as soon as the step before is over, which may be before the host
    has queued what comes after it. A step has begun when both are true, so that a device
    that waits for a late host counts as idle. For a graph the host's time is that at which
    its launch returned: an upper bound on the wait, for the device begins a little earlier.
    A step without a graph begins with its first kernel; should the device outrun the host
    between two of its kernels, that is not seen.
    """

    begin: torch.cuda.Event = field(default_factory=timing_event)
    end: torch.cuda.Event = field(default_factory=timing_event)
    queued_at: float = 0.0

    def queued(self) -> None:
        self.queued_at = time.monotonic()


class DeviceClock:
    """Chains each step's events to those of the step before.

    An event tells only its distance from another, in float32 milliseconds, so a distance
    from the start of the process would lose microseconds within minutes.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._last = timing_event()
        self._last.record(stream)
        self._last.synchronize()
        self._last_time = time.monotonic()

    def times(self, step: StepTiming, *, waited_from: float, now: float) -> tuple[float, float]:
        """Begin and end of a step whose end event was waited for from `waited_from` to `now`."""
        to_begin = self._last.elapsed_time(step.begin) / 1e3
        to_end = step.begin.elapsed_time(step.end) / 1e3
        finished_at = self._last_time + to_begin + to_end
        # The two clocks drift apart; what the host has seen bounds what can be true. A step
        # that had ended before the wait says only that it is not later than now.
        if now - waited_from > 1e-4:
            finished_at = max(finished_at, waited_from)
        finished_at = min(finished_at, now)
        self._last, self._last_time = step.end, finished_at
        return min(max(finished_at - to_end, step.queued_at), finished_at), finished_at
