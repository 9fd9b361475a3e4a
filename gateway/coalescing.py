"""How many tokens go into one message: one while the gateway keeps up, more while it lags.

A message costs this process about 20 µs whatever it holds, so one token in each is a limit
on tokens. What tells that the limit is near is the hop's lag, from a step's commit in the
worker to its arrival here: the backlog of a busy event loop lies in the hop, and not in the
streams' own queues, so that sending whatever is queued would merge nothing.
"""

import time
from collections import deque
from collections.abc import Iterable

# (lag in seconds below which it holds, tokens that wait for each other)
_LEVELS = ((0.003, 1), (0.008, 2), (0.030, 4))
_MOST_TOKENS = 8
_CALM_STEPS = 8
# The messages of a smaller step take less than half a millisecond: they are not what makes it
# late, and to send fewer would help nobody.
_LEAST_STEP = 16
# Pings that count; what was told before them may be out of date.
_MAX_PINGS = 15


class Coalescing:
    """How many tokens of a stream wait for each other, by how late steps come.

    More at the first late step; fewer, by half, only after several that came early enough: a
    gateway that sends all that waits after one good step is late again with the next.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._num_calm_steps = 0
        self.num_tokens = 1

    def observe(self, lag_s: float, step_tokens: int) -> None:
        """Takes note of how late the step was that has come, with so many tokens in it."""
        if not self._is_enabled:
            return
        wanted = _tokens_for(lag_s) if step_tokens >= _LEAST_STEP else 1
        if wanted >= self.num_tokens:
            self.num_tokens, self._num_calm_steps = wanted, 0
            return
        self._num_calm_steps += 1
        if self._num_calm_steps == _CALM_STEPS:
            self.num_tokens, self._num_calm_steps = self.num_tokens // 2, 0


def _tokens_for(lag_s: float) -> int:
    for limit_s, num_tokens in _LEVELS:
        if lag_s < limit_s:
            return num_tokens
    return _MOST_TOKENS


class RemoteClock:
    """A worker's wall clock by ours, corrected by no more than its answers to pings prove.

    An answer was given between the ping and its arrival, which bounds how far the clocks are
    apart. Where the bounds allow that they agree, as on one machine, they are taken to.
    """

    def __init__(self) -> None:
        # Least and greatest seconds that the remote clock may be behind ours.
        self._bounds: deque[tuple[float, float]] = deque(maxlen=_MAX_PINGS)
        self._behind_s = 0.0

    def observe(self, *, sent_at: float, told: float, received_at: float) -> None:
        """One ping and its answer; `told` is the remote clock's, the others are ours."""
        self._bounds.append((sent_at - told, received_at - told))
        self._behind_s = _nearest_zero(self._bounds)

    def age_s(self, told: float) -> float:
        """How long ago it was by the remote clock what it tells; never negative."""
        return max(0.0, time.time() - told - self._behind_s)


def _nearest_zero(bounds: Iterable[tuple[float, float]]) -> float:
    """The least correction within all the bounds; they may contradict when a clock was set."""
    least = max(low for low, _ in bounds)
    greatest = min(high for _, high in bounds)
    if least > greatest:
        # The newest is right.
        *_, (least, greatest) = bounds
    return min(max(0.0, least), greatest)
