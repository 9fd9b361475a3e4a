"""Which requests are taken into the queue at all, and the page arithmetic of letting them run."""

from collections import deque
from collections.abc import Collection

import numpy as np

from shared.errors import InvalidArgumentError, QueueFullError, UnimplementedError
from worker.messages import NewRequest
from worker.scheduler.rows import RowTable
from worker.step import EngineInfo, Int32Array, Int64Array

# Admissions that tell the pace, and how few are not enough.
_PACE_WINDOW = 32
_LEAST_ADMISSIONS = 8
_DEADLINE_MARGIN = 2.0
_MOST_RETRY_S = 60.0


def check_request(new: NewRequest, info: EngineInfo, eos_token_ids: Collection[int]) -> None:
    """Raises ServingError for what could never run, naming the public field."""
    prompt_len = len(new.prompt_token_ids)
    if not prompt_len:
        raise InvalidArgumentError("prompt", "must have at least one token")
    if prompt_len >= info.max_context:
        raise InvalidArgumentError(
            "prompt",
            f"has {prompt_len} tokens, but the context of {info.max_context} must hold them "
            "and at least one more",
        )
    if new.max_tokens < 1:
        raise InvalidArgumentError("max_tokens", f"must be at least 1, got {new.max_tokens}")
    if prompt_len + new.max_tokens > info.max_context:
        raise InvalidArgumentError(
            "max_tokens",
            f"{new.max_tokens} after a prompt of {prompt_len} tokens exceeds the context of "
            f"{info.max_context}",
        )
    if not 0 <= new.min_tokens <= new.max_tokens:
        raise InvalidArgumentError(
            "stopping.min_tokens",
            f"must be 0 to max_tokens, which is {new.max_tokens}, got {new.min_tokens}",
        )
    _check_something_is_left(new, eos_token_ids)
    if new.structured_output is not None and not info.has_logits:
        raise UnimplementedError("structured_output")
    _check_token_ids("prompt", new.prompt_token_ids, info.vocab_size)
    if new.stop_token_ids:
        stop_ids = np.array(new.stop_token_ids, np.int64)
        _check_token_ids("stopping.stop_token_ids", stop_ids, info.vocab_size)


def _check_something_is_left(new: NewRequest, eos_token_ids: Collection[int]) -> None:
    """Of the allowed ids, one at least must not be banned until min_tokens are sampled."""
    allowed = new.sampling.allowed_token_ids
    if not allowed or not new.min_tokens:
        return
    banned = {*new.stop_token_ids, *(() if new.ignore_eos else eos_token_ids)}
    if banned.issuperset(allowed):
        raise InvalidArgumentError(
            "sampling.allowed_token_ids",
            "all of them would end the completion, which min_tokens forbids",
        )


class QueuePace:
    """How fast the waiting queue moves, by its last admissions.

    Knows nothing until several requests in a row had others behind them: an empty queue says
    nothing of how long a full one takes.
    """

    def __init__(self) -> None:
        self._admitted_at: deque[float] = deque(maxlen=_PACE_WINDOW)

    def note(self, now: float, *, num_waiting: int) -> None:
        """A request was admitted, and so many still wait."""
        if num_waiting:
            self._admitted_at.append(now)
        else:
            self._admitted_at.clear()

    def wait_s(self, num_ahead: int, now: float) -> float | None:
        """Until a request with so many ahead of it is admitted; None: not known.

        Counted up to now, so that a queue that has come to a standstill is seen to be slow.
        """
        if len(self._admitted_at) < _LEAST_ADMISSIONS:
            return None
        return num_ahead * (now - self._admitted_at[0]) / len(self._admitted_at)


def check_deadline(new: NewRequest, now: float, num_ahead: int, pace: QueuePace) -> None:
    """Raises QueueFullError for a request that cannot begin in time, as far as is known.

    Refused early, it can still be served elsewhere, and it takes no place from others. Only
    when twice as fast a queue would be too slow, too: refusing wrongly is worse than waiting
    in vain.
    """
    if new.deadline is None or num_ahead <= 0:
        return
    wait_s = pace.wait_s(num_ahead, now)
    left_s = new.deadline - now
    if wait_s is None or wait_s <= _DEADLINE_MARGIN * left_s:
        return
    raise QueueFullError(
        f"cannot begin within the deadline, {left_s:.3g} s from now: {num_ahead} requests are "
        f"ahead, which will take about {wait_s:.3g} s",
        retry_after_ms=max(1, round(1e3 * min(wait_s, _MOST_RETRY_S))),
    )


def growth_reserve(rows: RowTable, headroom_tokens: int, page_size: int) -> int:
    """Pages that an admission must leave: room for each running row to grow a little.

    Only what it has now is allotted to a request, not what it may still sample, so pages may
    run out later. The reserve makes that rarer. It is at least a page for each row: a request
    that was preempted must not take back at once the very pages it was preempted for.
    """
    running = rows.running()
    if headroom_tokens <= page_size:
        # A page each: the least is the most, too.
        return int(np.count_nonzero(running))
    to_come = rows.end_lens[running] - rows.lens[running]
    growth = np.clip(to_come, 1, max(1, headroom_tokens))
    return int((-(-growth // page_size)).sum())


def _check_token_ids(field: str, token_ids: Int32Array | Int64Array, vocab_size: int) -> None:
    for extreme in (int(token_ids.min()), int(token_ids.max())):
        if not 0 <= extreme < vocab_size:
            raise InvalidArgumentError(
                field, f"token id {extreme} is not in the vocabulary of {vocab_size}"
            )
