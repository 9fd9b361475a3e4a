"""An engine whose i-th output token is the prompt's i-th token, then eos.

While min_tokens bans eos and stop ids it goes round its prompt instead, past those that are
banned. Of the adjustments of logits that is the only one it heeds.

It goes the whole way of a real one: its KV pool holds the token id that each slot was
written for, and it reads the token to echo back through the page table. So a page that is
freed too early, given twice or mapped wrongly shows as wrong text. It makes any sequence
of tokens reachable with any tokenizer, and needs no weights.
"""

import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from shared.errors import EngineError
from worker.step import (
    EngineInfo,
    Int32Array,
    LogprobsPlan,
    RowOpening,
    StepLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

# In a slot that was never written; no token id, so that reading it cannot go unnoticed.
UNWRITTEN = -1


class EchoMemory:
    """What a device holds: page table, token pool, and a KV pool of token ids."""

    def __init__(self, info: EngineInfo) -> None:
        self._page_size = info.page_size
        num_columns = -(-info.max_context // info.page_size)
        self._page_table = np.zeros((info.max_rows, num_columns), np.int32)
        self._kv_pool = np.full(info.num_pages * info.page_size, UNWRITTEN, np.int32)
        self._token_pool = np.full(info.max_rows + 1, UNWRITTEN, np.int32)

    def write(self, plan: StepPlan) -> None:
        """Applies the plan's page updates and writes the KV of its input tokens."""
        self._page_table[plan.page_rows, plan.page_columns] = plan.page_ids
        inputs = np.concatenate(
            [self._token_pool[plan.rows[: plan.num_decode]], plan.prefill_token_ids]
        )
        rows = np.repeat(plan.rows, plan.extend_lens)
        before = np.cumsum(plan.extend_lens) - plan.extend_lens
        positions = np.arange(len(rows)) + np.repeat(plan.cached_lens - before, plan.extend_lens)
        self._kv_pool[self._slots(rows, positions)] = inputs

    def read(self, rows: Int32Array, positions: Int32Array) -> Int32Array:
        """The token ids whose KV stands at these positions; the arrays broadcast."""
        tokens: Int32Array = self._kv_pool[self._slots(rows, positions)]
        return tokens

    def store(self, plan: StepPlan, token_ids: Int32Array) -> None:
        """Puts sampled tokens where the next step reads them."""
        self._token_pool[plan.write_rows] = token_ids

    def _slots(self, rows: Int32Array, positions: Int32Array) -> Int32Array:
        pages = self._page_table[rows, positions // self._page_size]
        slots: Int32Array = pages * self._page_size + positions % self._page_size
        return slots


def certain_logprobs(asked: LogprobsPlan | None) -> StepLogprobs | None:
    """Of an engine without logits: every token was certain, and there were no others."""
    if asked is None:
        return None
    return StepLogprobs(_certain(len(asked.rows)), _certain(len(asked.prompt_targets)))


class EchoEngine:
    """Runs its steps in order on a thread of its own, so that overlap is real.

    Steps are counted from 0 in order of launch: those in `failing_steps` raise EngineError
    before they do anything; each (step, place in its plan) in `faulty_rows` is flagged.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        eos_token_id: int,
        step_s: float = 0.0,
        failing_steps: Collection[int] = (),
        faulty_rows: Collection[tuple[int, int]] = (),
    ) -> None:
        self._info = replace(info, has_logits=False)
        self._eos_token_id = eos_token_id
        self._step_s = step_s
        self._failing_steps = frozenset(failing_steps)
        self._faulty_rows = frozenset(faulty_rows)
        self._memory = EchoMemory(info)
        # By row, of the last request that was opened there; used on the engine's thread alone.
        self._openings: dict[int, RowOpening] = {}
        self._num_launched = 0
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="echo-engine")

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan) -> "EchoStep":
        step, self._num_launched = self._num_launched, self._num_launched + 1
        return EchoStep(self._thread.submit(self._run, step, plan))

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown(wait=True)

    def _run(self, step: int, plan: StepPlan) -> StepResult:
        started_at = time.monotonic()
        if step in self._failing_steps:
            raise EngineError(f"step {step} was told to fail")
        self._memory.write(plan)
        self._openings.update((opening.row, opening) for opening in plan.openings)
        token_ids = self._echo(plan)
        self._memory.store(plan, token_ids)
        # The work is part of the step's time, so that the pace is that of a real engine.
        left_s = started_at + self._step_s - time.monotonic()
        if left_s > 0:
            self._closing.wait(left_s)
        faulty = np.zeros(plan.num_rows, np.bool_)
        faulty[[row for at, row in self._faulty_rows if at == step and row < plan.num_rows]] = True
        logprobs = certain_logprobs(plan.logprobs)
        return StepResult(token_ids, faulty, started_at, time.monotonic(), logprobs)

    def _echo(self, plan: StepPlan) -> Int32Array:
        index = plan.cached_lens + plan.extend_lens - plan.prompt_lens
        # Rows that sample nothing yet have a negative index; what they get is not read.
        in_prompt = np.clip(index, 0, plan.prompt_lens - 1)
        echoed = self._memory.read(plan.rows, in_prompt)
        token_ids = np.where(index < plan.prompt_lens, echoed, self._eos_token_id).astype(np.int32)
        for i in plan.adjusted.tolist():
            opening = self._openings.get(int(plan.rows[i]))
            # A row whose step failed before it was opened is named, but not read.
            if opening is None or plan.cached_lens[i] + plan.extend_lens[i] >= opening.min_len:
                continue
            if token_ids[i] in opening.banned_ids:
                prompt = self._memory.read(plan.rows[i], np.arange(plan.prompt_lens[i]))
                token_ids[i] = _next_free(prompt, int(index[i]), opening.banned_ids)
        return token_ids


class EchoStep:
    """A step that was launched; it has no logits that a mask could be laid on."""

    def __init__(self, future: "Future[StepResult]") -> None:
        self._future = future

    def mask_buffer(self) -> None:
        return None

    def provide_masks(self, bitmasks: Int32Array) -> None:
        pass

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> StepResult:
        return self._future.result()


def _next_free(prompt: Int32Array, index: int, banned_ids: Int32Array) -> int:
    """The first token at or after `index` that is not banned, round and round the prompt."""
    turned = np.roll(prompt, -index)
    free = turned[~np.isin(turned, banned_ids)]
    if not len(free):
        # Of one id more than there are banned ones, one is free.
        free = np.setdiff1d(np.arange(len(banned_ids) + 1), banned_ids)
    return int(free[0])


def _certain(num_entries: int) -> TokenLogprobs | None:
    if not num_entries:
        return None
    return TokenLogprobs(
        logprobs=np.zeros(num_entries, np.float32),
        ranks=np.ones(num_entries, np.int32),
        top_ids=np.empty((num_entries, 0), np.int32),
        top_logprobs=np.empty((num_entries, 0), np.float32),
    )
