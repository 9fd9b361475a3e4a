"""When a call is tried again, and after how long. Pure: reads the clock, never sleeps."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem_client.errors import (
    AlreadyExistsError,
    ResourceExhaustedError,
    TandemError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is tried again, and how long it waits in between.

    The waits double from `first_wait_s` to `max_wait_s`. A server may ask for longer than
    the next of them, but not for more than `max_wait_s`: then the call fails at once, with
    `retry_after_s` in its error.
    """

    max_retries: int = 3
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or not 0 <= self.first_wait_s <= self.max_wait_s:
            raise ValueError(
                "needs max_retries of at least 0 and 0 <= first_wait_s <= max_wait_s, got "
                f"{self.max_retries}, {self.first_wait_s:g} and {self.max_wait_s:g}"
            )


# 30 years. To gRPC, a deadline in some centuries has passed already.
_FOR_EVER_S = 1e9

DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(max_retries=0)


class Attempts:
    """The attempts of one call, which all together have `timeout_s`."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s: must be above 0, got {timeout_s:g}")
        self._policy = policy
        self._now = now
        # A deadline that never comes; gRPC takes only None for that.
        self._deadline = (
            None if timeout_s is None or timeout_s >= _FOR_EVER_S else now() + timeout_s
        )
        self._num_retries = 0
        self._next_wait_s = policy.first_wait_s

    def remaining_s(self) -> float | None:
        """What the next attempt may take; None: as long as it takes."""
        return None if self._deadline is None else max(self._deadline - self._now(), 0.0)

    def wait_s(self, error: TandemError) -> float | None:
        """How long to wait before the next attempt; None when the error is final."""
        if self._num_retries >= self._policy.max_retries or not self._may_pass(error):
            return None
        asked_s = error.retry_after_s or 0.0
        if asked_s > self._policy.max_wait_s:
            return None
        # Upwards from what the server asked for, and both ways from what we chose:
        # clients that were refused together should not come back together.
        wait_s = max(
            self._next_wait_s * random.uniform(0.5, 1.0), asked_s * random.uniform(1, 1.25)
        )
        remaining_s = self.remaining_s()
        if remaining_s is not None and wait_s >= remaining_s:
            return None
        self._num_retries += 1
        self._next_wait_s = min(2 * self._next_wait_s, self._policy.max_wait_s)
        return wait_s

    def _may_pass(self, error: TandemError) -> bool:
        match error:
            case UnavailableError():
                return True
            case ResourceExhaustedError():
                # Without a time, it was the message that was too large.
                return error.retry_after_s is not None
            case AlreadyExistsError():
                # The id is that of an attempt whose end the gateway has yet to notice.
                return self._num_retries > 0
            case _:
                return False
