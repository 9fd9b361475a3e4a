"""Decides what runs and accounts for it; never executes.

One thread owns it. Steps are planned one after another and committed (or failed) in the same
order; `plan` may be called while earlier steps are in flight.
"""

from collections import deque
from collections.abc import Iterable, KeysView

import numpy as np

from shared.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    EngineError,
    QueueFullError,
    ServingError,
)
from shared.types import FinishReason
from worker.messages import Load, NewRequest, StepOutput
from worker.scheduler import integrity
from worker.scheduler.admission import check_deadline, check_request
from worker.scheduler.cache_summary import CacheSummary
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.lifecycle import Lifecycle
from worker.scheduler.logprobs import of_prompts, of_sampled, without_numbers
from worker.scheduler.planner import Planner
from worker.scheduler.rows import Phase
from worker.step import (
    BoolArray,
    EngineInfo,
    IndexArray,
    Int32Array,
    Int64Array,
    StepLogprobs,
    StepPlan,
    StepResult,
)


class Scheduler:
    """Requests in, step plans out; step results in, tokens and endings out.

    ValueError if the engine cannot hold one whole context or its page size is no power of two.
    """

    def __init__(
        self, config: SchedulerConfig, info: EngineInfo, eos_token_ids: Iterable[int]
    ) -> None:
        if info.page_size < 1 or info.page_size & (info.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {info.page_size}")
        if info.num_pages * info.page_size < info.max_context:
            raise ValueError(
                f"{info.num_pages} pages of {info.page_size} tokens cannot hold one context "
                f"of {info.max_context}"
            )
        self._config = config
        self._info = info
        eos_ids = [token for token in eos_token_ids if token < info.vocab_size]
        self._eos_token_ids = frozenset(eos_ids)
        self._lifecycle = Lifecycle(info, eos_ids, prefix_caching=config.prefix_caching)
        self._rows = self._lifecycle.rows
        self._planner = Planner(config, info, self._lifecycle)
        self._summary = CacheSummary(self._lifecycle.kv.tree, info.page_size, info.max_context)
        self._in_flight: deque[int] = deque()
        self._is_eos = np.zeros(info.vocab_size, np.bool_)
        self._is_eos[eos_ids] = True
        self._num_steps = 0
        self._num_generated = 0
        self._idle_s = 0.0
        # When the device last finished a step after which there was more to do.
        self._device_free_at: float | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is live, in flight or still to be told."""
        lifecycle = self._lifecycle
        return not lifecycle.live and not self._in_flight and lifecycle.output.is_empty

    @property
    def num_cache_nodes(self) -> int:
        """Nodes of the radix tree, whose number should cost nothing."""
        return self._lifecycle.kv.tree.num_nodes

    @property
    def live_uids(self) -> KeysView[int]:
        """Of all requests that have not ended."""
        return self._lifecycle.live.keys()

    def uids_of(self, rows: Int32Array) -> Int64Array:
        """The requests that hold these rows."""
        return self._rows.uids[rows]

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do, if ever."""
        return self._lifecycle.expiries.next_due()

    def add(self, new: NewRequest, now: float, *, held: bool = False) -> int:
        """Queues a request; returns how many wait ahead of it. Raises ServingError.

        A held one waits, counts and expires like the others, but is not planned before
        `release`.
        """
        if new.uid in self._lifecycle.live:
            raise AlreadyExistsError(f"uid {new.uid} is live")
        check_request(new, self._info, self._eos_token_ids)
        # Those that can be admitted in the next step do not count as waiting.
        num_beyond = len(self._lifecycle.waiting) - max(0, self._planner.num_free_places)
        if num_beyond >= self._config.max_waiting:
            raise QueueFullError(
                f"{len(self._lifecycle.waiting)} requests are waiting, "
                f"the limit is {self._config.max_waiting}",
                retry_after_ms=self._config.retry_after_ms,
            )
        position = self._lifecycle.waiting.position(new.priority, new.client)
        num_ahead = position - max(0, self._planner.num_free_places)
        check_deadline(new, now, num_ahead, self._lifecycle.pace)
        self._lifecycle.enqueue(new, now, position=position, held=held)
        return position

    def release(self, uid: int) -> None:
        """Lets a held request be planned; one that has ended meanwhile is passed over."""
        request = self._lifecycle.live.get(uid)
        if request is not None:
            self._lifecycle.waiting.release(request)

    def fail_request(self, uid: int, error: ServingError) -> None:
        """Ends one request with an error; one that has ended already is passed over."""
        request = self._lifecycle.live.get(uid)
        if request is not None:
            self._lifecycle.fail(request, error)

    def reject(self, uid: int, error: ServingError) -> None:
        """Tells of a request that was never taken up."""
        self._lifecycle.output.add_failed(uid, error)

    def abort(self, uids: Iterable[int], report: bool, now: float) -> None:
        """Ends requests; a uid that is not live has ended already and is passed over."""
        for uid in uids:
            request = self._lifecycle.live.get(uid)
            if request is None:
                continue
            if report:
                self._lifecycle.finish(request, FinishReason.ABORTED, now)
            else:
                self._lifecycle.drop(request)

    def expire(self, now: float) -> None:
        """Ends requests whose deadline or time limit has come, queued or running."""
        while request := self._lifecycle.expiries.pop_due(now):
            deadline = request.new.deadline
            if deadline is not None and deadline <= now:
                waited_s = deadline - request.arrived_at
                error = DeadlineExceededError(f"not done within the deadline of {waited_s:.3g} s")
                self._lifecycle.fail(request, error)
            else:
                self._lifecycle.finish(request, FinishReason.TIME_LIMIT, now)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, which the caller must launch, or at least fail. None: not now."""
        plan = self._planner.plan(self._num_steps, now)
        if plan is None:
            lifecycle = self._lifecycle
            assert self._in_flight or len(lifecycle.live) == lifecycle.waiting.num_held, (
                "nothing can go on"
            )
            return None
        self._num_steps += 1
        self._in_flight.append(plan.step_id)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Takes the tokens of the oldest step in flight."""
        rows = self._leave(plan)
        state = self._rows
        # KV counts only on top of valid KV: after a step that failed, all of it is void.
        valid_lens = state.valid_lens[rows]
        sound = ~result.faulty & (valid_lens == plan.cached_lens)
        state.valid_lens[rows] = valid_lens + sound * plan.extend_lens
        # A request may have ended while the step ran; what the step gave it is dropped.
        is_open = state.phase[rows] != Phase.ENDED.value
        faulty = result.faulty
        if plan.logprobs is not None and result.logprobs is not None:
            faulty = faulty | without_numbers(plan, result.logprobs)
            self._tell_prompts(plan, result.logprobs, is_open & ~faulty)
        kept = plan.samples & is_open & ~faulty
        self._append(plan, result, rows, kept, now)
        if plan.num_decode < plan.num_rows:
            self._share_prompts(rows[plan.num_decode :][kept[plan.num_decode :]], now)
        if np.count_nonzero(faulty):
            error = EngineError("the model's output was not finite")
            self._fail_rows(rows[faulty & is_open], error)
        self._release(rows)
        self._account_idle(result)

    def fail(self, plan: StepPlan, error: ServingError) -> None:
        """Ends the requests of the oldest step in flight, and no others."""
        rows = self._leave(plan)
        self._device_free_at = None
        self._fail_rows(rows[self._rows.phase[rows] != Phase.ENDED.value], error)
        self._release(rows)

    def drain_output(self, now: float) -> StepOutput | None:
        """All there is to tell since the last call, if anything."""
        if self._lifecycle.output.is_empty:
            return None
        return self._lifecycle.output.drain(self.load(), now)

    def load(self) -> Load:
        """Cached pages are those in the tree that nobody holds; a running request's shared
        ones count as held, so nothing is held when nothing runs."""
        kv = self._lifecycle.kv
        free, cached = kv.pool.num_free, kv.tree.num_evictable
        return Load(
            running=self._lifecycle.num_running,
            waiting=len(self._lifecycle.waiting),
            pages_total=kv.pool.num_pages,
            pages_free=free,
            pages_cached=cached,
            pages_held=kv.pool.num_pages - free - cached,
            steps=self._num_steps,
            preemptions=self._lifecycle.num_preemptions,
            prompt_tokens=self._lifecycle.num_prompt_tokens,
            cached_tokens=self._lifecycle.num_cached_tokens,
            generated_tokens=self._num_generated,
            idle_s=self._idle_s,
        )

    def flush_cache(self) -> int:
        """Drops every cached page that no request holds; returns how many."""
        return self._lifecycle.kv.flush()

    def cached_prefixes(self) -> bytes | None:
        """What is told of the cache, if it has changed; not for every step."""
        return self._summary.take()

    def check_integrity(self) -> None:
        """Raises IntegrityError if a page or a row is not in exactly one place."""
        integrity.check_all(self._lifecycle)

    def check_idle(self) -> None:
        """The cheap form of the check, for when `is_idle`."""
        integrity.check_idle(self._lifecycle)

    def _leave(self, plan: StepPlan) -> IndexArray:
        """Takes a step from those in flight; returns its rows."""
        assert self._in_flight and self._in_flight[0] == plan.step_id, "steps end in order"
        self._in_flight.popleft()
        self._rows.num_steps_over = plan.step_id + 1
        self._lifecycle.kv.step_over(plan.step_id)
        return plan.rows.astype(np.intp)

    def _append(
        self, plan: StepPlan, result: StepResult, rows: IndexArray, kept: BoolArray, now: float
    ) -> None:
        """Adds the tokens of the `kept` among a step's rows, and ends what is done with them."""
        state = self._rows
        rows, token_ids = rows[kept], result.token_ids[kept]
        is_last = state.append(rows, token_ids, now)
        self._num_generated += len(rows)
        is_eos = self._is_eos.take(token_ids) & state.heeds_eos(rows)
        is_stop = state.hits_stop(rows, token_ids)
        is_matched = is_eos | is_stop
        shown = ~is_matched
        self._lifecycle.output.add_tokens(state.uids[rows[shown]], token_ids[shown])
        if plan.logprobs is not None and result.logprobs is not None:
            shown_rows = kept.copy()
            shown_rows[kept] = shown
            told = of_sampled(plan, result.logprobs, result.token_ids, shown_rows, state)
            self._lifecycle.output.add_logprobs(told)
        for i in (is_matched | is_last).nonzero()[0].tolist():
            reason, matched = FinishReason.LENGTH, -1
            if is_matched[i]:
                reason = FinishReason.EOS if is_eos[i] else FinishReason.STOP_TOKEN
                matched = int(token_ids[i])
            request = state.request_of(int(rows[i]))
            if request.first_token_at is None:
                request.first_token_at = now
            self._lifecycle.finish(request, reason, now, matched)

    def _tell_prompts(self, plan: StepPlan, logprobs: StepLogprobs, told: BoolArray) -> None:
        assert plan.logprobs is not None
        self._lifecycle.output.add_logprobs(of_prompts(plan, logprobs, told, self._rows))
        counts = plan.logprobs.prompt_counts.tolist()
        for i, count in zip(plan.logprobs.prompt_rows.tolist(), counts, strict=True):
            if told[i]:
                self._rows.request_of(int(plan.rows[i])).num_prompt_logprobs += count

    def _share_prompts(self, rows: IndexArray, now: float) -> None:
        """Puts the prompts of rows whose prefill a step completed in the tree."""
        reading_step = self._in_flight[-1] if self._in_flight else None
        for row in rows.tolist():
            request = self._rows.requests[row]
            if request is None:
                continue
            if request.first_token_at is None:
                request.first_token_at = now
            if self._rows.phase[row] != Phase.DECODE.value:
                continue
            tokens = self._rows.valid_tokens(row)
            self._lifecycle.kv.share(row, tokens, request.new.cache_salt, reading_step)

    def _fail_rows(self, rows: IndexArray, error: ServingError) -> None:
        # What led to a fault may have begun in an earlier chunk: none of its KV is shared.
        self._rows.valid_lens[rows] = 0
        for row in rows.tolist():
            self._lifecycle.fail(self._rows.request_of(row), error)

    def _release(self, rows: IndexArray) -> None:
        """Lets go of those of a step's rows that are planned no more."""
        leaving = self._rows.phase[rows] >= Phase.PREEMPTED.value
        for row in rows[leaving].tolist():
            self._lifecycle.release_idle(row)
        if self._config.check_integrity:
            self.check_integrity()

    def _account_idle(self, result: StepResult) -> None:
        if self._device_free_at is not None:
            self._idle_s += max(0.0, result.started_at - self._device_free_at)
        self._device_free_at = result.finished_at if self._lifecycle.live else None
