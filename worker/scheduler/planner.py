"""Chooses the rows of the next step and lays them out as a StepPlan.

Works on lengths alone: what a step in flight samples is not known yet, but that it samples,
and how many, is.
"""

import numpy as np

from worker.scheduler.admission import growth_reserve
from worker.scheduler.config import Policy, SchedulerConfig
from worker.scheduler.lifecycle import Lifecycle
from worker.scheduler.request import Chunk, Request
from worker.scheduler.rows import Phase
from worker.step import EngineInfo, IndexArray, Int32Array, RowOpening, StepPlan

_NO_ROWS = np.empty(0, np.intp)
_NO_INDICES = np.empty(0, np.int32)


class Planner:
    """Plans one step after another; the only caller of `admit` and `preempt`."""

    def __init__(self, config: SchedulerConfig, info: EngineInfo, lifecycle: Lifecycle) -> None:
        self._config = config
        self._page_size = info.page_size
        self._sentinel = np.int32(info.max_rows)
        # Extend lens of decode rows; plans have parts of it.
        self._ones = np.ones(info.max_rows, np.int32)
        self._max_running = min(config.max_running, info.max_rows)
        self._lifecycle = lifecycle
        self._rows = lifecycle.rows
        self._kv = lifecycle.kv

    @property
    def num_free_places(self) -> int:
        """How many more requests may run at once."""
        return self._max_running - self._lifecycle.num_running

    def plan(self, step_id: int, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing that could be computed now."""
        budget = self._config.token_budget
        if self._config.policy is Policy.PREFILL_FIRST:
            chunks = self._choose_chunks(budget, now)
            decode = _NO_ROWS if chunks else self._choose_decode(budget)
        else:
            decode = self._choose_decode(budget)
            chunks = self._choose_chunks(budget - len(decode), now)
        if not len(decode) and not chunks:
            return None
        return self._lay_out(step_id, decode, chunks)

    def _choose_decode(self, budget: int) -> IndexArray:
        """Rows that get one token, each with a page for the KV of its last one."""
        rows = self._decoding()
        if len(rows) > budget:
            rows = np.sort(self._by_order(rows)[:budget])
        growing = self._kv.needs_page(rows, self._rows.computed_lens[rows])
        if len(growing) > self._kv.num_available:
            growing, rows = self._ration(growing, rows)
        self._kv.grow(growing)
        return rows

    def _ration(self, growing: IndexArray, rows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Preempts until pages suffice, now or when steps in flight are over.

        Returns those that may grow now, the first served first, and all rows that may decode;
        the others are left out of this step.
        """
        self._preempt_for(growing)
        still = self._rows.phase[growing] == Phase.DECODE.value
        granted = self._by_order(growing[still])[: self._kv.num_available]
        allowed = self._rows.phase[rows] == Phase.DECODE.value
        allowed &= ~np.isin(rows, growing) | np.isin(rows, granted)
        return granted, rows[allowed]

    def _preempt_for(self, growing: IndexArray) -> None:
        phase = self._rows.phase
        leaving = np.flatnonzero(phase >= Phase.PREEMPTED.value).tolist()
        coming = self._kv.num_retired + sum(self._kv.reclaimable(row) for row in leaving)
        shortage = len(growing) - self._kv.num_available - coming
        wanting = set(growing.tolist())
        running = self._by_order(self._rows.running().nonzero()[0])
        # The last served go first. The first served never goes: it can always have all
        # pages, since the pool holds a whole context, so something always gets on.
        for row in running[:0:-1].tolist():
            if shortage <= 0:
                return
            shortage -= self._kv.reclaimable(row) + int(row in wanting)
            self._lifecycle.preempt(self._rows.request_of(row))

    def _choose_chunks(self, budget: int, now: float) -> list[Chunk]:
        """Those of the prefills that go on, then of those that begin."""
        chunks: list[Chunk] = []
        for request in self._lifecycle.prefilling:
            if budget <= 0:
                break
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1].extend_len
        while budget > 0:
            admitted = self._admit_next(now)
            if admitted is None:
                break
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].extend_len
        return chunks

    def _chunk(self, request: Request, budget: int) -> Chunk:
        start = int(self._rows.computed_lens[request.row])
        left = int(self._rows.known_lens[request.row]) - start
        return Chunk(request, start, min(budget, left), is_last=left <= budget)

    def _admit_next(self, now: float) -> Request | None:
        """The queue's first request, if there is a place and there are pages for it.

        It alone is tried: letting smaller ones pass would starve the large.
        """
        if self.num_free_places <= 0 or not self._kv.table.num_free_rows:
            return None
        request = self._lifecycle.waiting.peek()
        if request is None:
            return None
        match = self._kv.match(
            request.token_ids,
            request.new.cache_salt,
            needs_all_logits=not request.has_prompt_logprobs,
        )
        num_new = self._kv.pages_for(len(request.token_ids)) - len(match.pages)
        reserve = growth_reserve(self._rows, self._config.headroom_tokens, self._page_size)
        if num_new + reserve > self._kv.num_available - match.num_unlocked:
            return None
        return self._lifecycle.admit(match, self._page_size, now)

    def _lay_out(self, step_id: int, decode: IndexArray, chunks: list[Chunk]) -> StepPlan:
        state = self._rows
        rows, extend_lens = decode, self._ones[: len(decode)]
        prefill_token_ids = _NO_INDICES
        if chunks:
            rows = np.concatenate([rows, [chunk.request.row for chunk in chunks]])
            extends = np.array([chunk.extend_len for chunk in chunks], np.int32)
            extend_lens = np.concatenate([extend_lens, extends])
            prefill_token_ids = self._take_tokens(chunks)
        cached_lens = state.computed_lens[rows]
        computed = cached_lens + extend_lens
        lens = state.lens[rows]
        # Only an unfinished chunk leaves tokens that are there to be computed.
        samples = computed == lens
        lens = lens + samples
        row_ids = rows.astype(np.int32)
        write_rows = np.where(samples & (lens < state.end_lens[rows]), row_ids, self._sentinel)
        page_rows, page_columns, page_ids = self._kv.table.take_updates(rows)
        state.computed_lens[rows] = computed
        state.lens[rows] = lens
        state.last_steps[rows] = step_id
        openings: tuple[RowOpening, ...] = ()
        adjusted = masked = _NO_INDICES
        logprobs = None
        features = state.features
        if features.num_open:
            openings = features.take_openings()
            adjusted = features.adjusted(rows, samples, computed)
            masked = features.masked(rows, samples)
            logprobs = features.logprobs(rows, samples, chunks)
        return StepPlan(
            step_id=step_id,
            num_decode=len(decode),
            rows=row_ids,
            cached_lens=cached_lens,
            extend_lens=extend_lens,
            prefill_token_ids=prefill_token_ids,
            write_rows=write_rows,
            samples=samples,
            prompt_lens=state.prompt_lens[rows],
            page_rows=page_rows,
            page_columns=page_columns,
            page_ids=page_ids,
            sampling=state.sampling(rows),
            openings=openings,
            adjusted=adjusted,
            masked=masked,
            logprobs=logprobs,
        )

    def _take_tokens(self, chunks: list[Chunk]) -> Int32Array:
        """The tokens of all chunks. What is prefilled with them decodes from the next step on."""
        parts = []
        for chunk in chunks:
            row = chunk.request.row
            parts.append(self._rows.token_ids[row, chunk.start : chunk.start + chunk.extend_len])
            if chunk.is_last:
                self._rows.phase[row] = Phase.DECODE
                self._lifecycle.prefilling.remove(chunk.request)
        return np.concatenate(parts)

    def _decoding(self) -> IndexArray:
        state = self._rows
        # A row whose last token is in flight has nothing left to compute.
        ready = (state.phase == Phase.DECODE.value) & (state.lens < state.end_lens)
        decoding: IndexArray = ready.nonzero()[0]
        return decoding

    def _by_order(self, rows: IndexArray) -> IndexArray:
        """The rows, those served first at the front."""
        ordered = sorted(rows.tolist(), key=lambda row: self._rows.request_of(row).order)
        return np.array(ordered, np.intp)
