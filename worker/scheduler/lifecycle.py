"""Every change of a request's state, and the one path by which rows and pages come back.

Whatever ends or preempts a request marks it and leaves it to `_release_if_free`; that acts
once the request is planned no more *and* no step in flight holds its row, and nothing else
ever frees a row.
"""

from collections.abc import Iterable

import numpy as np

from shared.errors import ServingError
from shared.types import FinishReason
from worker.messages import Finished, NewRequest, Started
from worker.scheduler.admission import QueuePace
from worker.scheduler.kv_cache import KVCacheManager
from worker.scheduler.output import OutputBuffer
from worker.scheduler.radix_tree import PrefixMatch
from worker.scheduler.request import NO_ROW, Request, RequestState
from worker.scheduler.rows import Phase, RowTable
from worker.scheduler.waiting import Expiries, WaitingQueue
from worker.step import EngineInfo


class Lifecycle:
    """The live requests, and what they hold."""

    def __init__(
        self, info: EngineInfo, eos_token_ids: Iterable[int], *, prefix_caching: bool
    ) -> None:
        self.rows = RowTable(info, eos_token_ids)
        self.kv = KVCacheManager(info, prefix_caching=prefix_caching)
        self.waiting = WaitingQueue()
        self.pace = QueuePace()
        self.expiries = Expiries()
        self.output = OutputBuffer()
        # All but the ended ones, by uid.
        self.live: dict[int, Request] = {}
        # Those whose prefill is not wholly planned, in the order in which it goes on.
        self.prefilling: list[Request] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._num_arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self.live) - len(self.waiting)

    def enqueue(self, new: NewRequest, now: float, *, position: int, held: bool) -> Request:
        request = Request(
            new=new,
            arrival=self._num_arrivals,
            arrived_at=new.arrived_at or now,
            queue_position=position,
            # Of the row tokens' type, by whose bytes the radix tree knows them.
            token_ids=np.ascontiguousarray(new.prompt_token_ids, np.int32),
        )
        self._num_arrivals += 1
        self.live[request.uid] = request
        (self.waiting.hold if held else self.waiting.push)(request)
        self.expiries.watch(request)
        return request

    def admit(self, match: PrefixMatch, page_size: int, now: float) -> Request:
        """Gives the queue's first request a row, pages for all its tokens, and its prefill."""
        request = self.waiting.pop()
        self.pace.note(now, num_waiting=len(self.waiting))
        row = self.kv.admit(match, len(request.token_ids))
        cached_len = len(match.pages) * page_size
        self.rows.open(row, request, cached_len)
        request.row = row
        request.state = RequestState.RUNNING
        self.prefilling.append(request)
        if request.admitted_at is None:
            self._start(request, cached_len, now)
        return request

    def finish(
        self, request: Request, reason: FinishReason, now: float, matched_token_id: int = -1
    ) -> None:
        """Ends a live request with its usage."""
        admitted_at = now if request.admitted_at is None else request.admitted_at
        first_token_at = now if request.first_token_at is None else request.first_token_at
        last_token_at = request.last_token_at
        completion_tokens = len(request.token_ids) - request.prompt_len
        if request.row != NO_ROW:
            last_token_at = float(self.rows.last_token_at[request.row])
            completion_tokens = int(self.rows.known_lens[request.row]) - request.prompt_len
        self.output.add_finished(
            Finished(
                uid=request.uid,
                reason=reason,
                matched_token_id=matched_token_id,
                cached_tokens=request.cached_tokens,
                completion_tokens=completion_tokens,
                queue_s=admitted_at - request.arrived_at,
                prefill_s=first_token_at - admitted_at,
                decode_s=max(0.0, last_token_at - first_token_at),
            )
        )
        self._end(request)

    def fail(self, request: Request, error: ServingError) -> None:
        """Ends a live request with an error."""
        self.output.add_failed(request.uid, error)
        self._end(request)

    def drop(self, request: Request) -> None:
        """Ends a live request of which nobody wants to hear."""
        self._end(request)

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the queue, at once or with what is in flight."""
        request.state = RequestState.PREEMPTED
        self._stop_planning(request, Phase.PREEMPTED)
        self._release_if_free(request)

    def release_idle(self, row: int) -> None:
        """Frees a row that is planned no more, if the step just over was its last."""
        self._release_if_free(self.rows.request_of(row))

    def _start(self, request: Request, cached_len: int, now: float) -> None:
        request.admitted_at = now
        request.cached_tokens = cached_len
        self.num_prompt_tokens += request.prompt_len
        self.num_cached_tokens += cached_len
        self.output.add_started(
            Started(request.uid, cached_len, request.queue_position, now - request.arrived_at)
        )

    def _end(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self.waiting.discard(request)
        request.state = RequestState.ENDED
        del self.live[request.uid]
        if request.row != NO_ROW:
            self._stop_planning(request, Phase.ENDED)
            self._release_if_free(request)

    def _stop_planning(self, request: Request, phase: Phase) -> None:
        if self.rows.phase[request.row] == Phase.PREFILL.value:
            self.prefilling.remove(request)
        self.rows.phase[request.row] = phase

    def _release_if_free(self, request: Request) -> None:
        row = request.row
        if self.rows.is_in_flight(row):
            return
        # Valid KV only: that of a step that failed, or after one, must not reach the tree.
        self.kv.share(row, self.rows.valid_tokens(row), request.new.cache_salt, None)
        if request.state is RequestState.PREEMPTED:
            request.token_ids = self.rows.known_tokens(row).copy()
            request.last_token_at = float(self.rows.last_token_at[row])
        self.kv.release(row)
        self.rows.close(row)
        request.row = NO_ROW
        if request.state is RequestState.PREEMPTED:
            request.state = RequestState.WAITING
            self.num_preemptions += 1
            self.waiting.push(request)
