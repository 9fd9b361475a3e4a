"""The scheduler's knobs. Knows nothing of where they come from."""

from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """What a step holds while some requests decode and others wait for their prefill."""

    # Decode rows first, prefill chunks in the rest of the budget: running streams never stall.
    MIXED = "mixed"
    # Prefill alone as long as there is any: fuller decode batches, worse inter-token latency.
    PREFILL_FIRST = "prefill_first"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy; ValueError for what makes no sense."""

    # Most tokens in one step. With fewer than there are decode rows, the oldest go first.
    token_budget: int = 2048
    max_running: int = 256
    # Requests beyond those that a free place in the running set awaits.
    max_waiting: int = 1024
    policy: Policy = Policy.MIXED
    prefix_caching: bool = True
    # A request is admitted only if every running one can still grow by this many tokens.
    # Small: it is there so that a resumed request is not preempted again at once.
    headroom_tokens: int = 16
    # What a caller is told to wait when the queue is full.
    retry_after_ms: int = 1000
    # Run the whole integrity check after every step; for tests and for hunting a fault.
    check_integrity: bool = False

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "retry_after_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_waiting", "headroom_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
