"""One request's life: what was asked, where it stands, when things happened.

What a running request needs in every step is not here but in the arrays of RowTable.
"""

from dataclasses import dataclass
from enum import Enum, auto

from worker.messages import NewRequest
from worker.step import Int32Array

NO_ROW = -1


class RequestState(Enum):
    """WAITING -> RUNNING -> ENDED, with RUNNING -> PREEMPTED -> WAITING as often as it takes."""

    # In the queue, without a row.
    WAITING = auto()
    # Has a row, and is planned.
    RUNNING = auto()
    # Still has its row because a step in flight uses it; is planned no more, and goes
    # back to the queue with what that step samples.
    PREEMPTED = auto()
    # Its terminal event is out. Has a row for as long as a step in flight uses it.
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; changed by Lifecycle alone."""

    new: NewRequest
    # Counts the requests that came before it; its place within its priority for good.
    arrival: int
    arrived_at: float
    queue_position: int
    # The prompt, and after a preemption also what was sampled until then. While the
    # request has a row, the row's tokens are the current ones.
    token_ids: Int32Array
    state: RequestState = RequestState.WAITING
    row: int = NO_ROW
    # Of the first admission; a resumed request keeps them.
    admitted_at: float | None = None
    cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    # Of the prompt's log-probabilities, how many have been told.
    num_prompt_logprobs: int = 0

    @property
    def uid(self) -> int:
        return self.new.uid

    @property
    def prompt_len(self) -> int:
        return len(self.new.prompt_token_ids)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether nothing of its prompt's log-probabilities is owed, if it asked for any."""
        return self.new.prompt_logprobs is None or self.num_prompt_logprobs >= self.prompt_len - 1

    @property
    def order(self) -> tuple[int, int]:
        """Smaller is served earlier and preempted later."""
        return (-self.new.priority, self.arrival)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a request's prefill: its `extend_len` tokens from position `start` on."""

    request: Request
    start: int
    extend_len: int
    # Nothing of what is known is left after it.
    is_last: bool
