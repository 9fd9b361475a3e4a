"""Step plans written by hand: a scheduler for tests that decides nothing by itself."""

from collections.abc import Mapping, Sequence

import numpy as np

from shared.types import SamplingParams
from worker.step import Int32Array, SamplingBatch, StepPlan

GREEDY = SamplingParams(temperature=0.0)


class PlanBuilder:
    """Keeps each row's length and gives its tokens pages in a scrambled order."""

    def __init__(self, *, page_size: int, num_pages: int, max_rows: int, seed: int = 0) -> None:
        self._page_size = page_size
        self._max_rows = max_rows
        # A run of pages without gaps takes another path through attention than scattered ones.
        self._free = [int(page) for page in np.random.default_rng(seed).permutation(num_pages)]
        self._num_pages = [0] * max_rows
        self._lengths = [0] * max_rows
        self._num_steps = 0

    def plan(
        self,
        decode: Sequence[int] = (),
        prefill: Mapping[int, Sequence[int]] | None = None,
        *,
        unfinished: Sequence[int] = (),
        unwritten: Sequence[int] = (),
        sampling: Mapping[int, SamplingParams] | None = None,
    ) -> StepPlan:
        """One step: a token for each row of `decode`, these tokens for those of `prefill`.

        Rows of `unfinished` do not sample; the tokens of `unwritten` go to the sentinel.
        """
        chunks = dict(prefill or {})
        rows = [*decode, *chunks]
        extend = [1] * len(decode) + [len(chunk) for chunk in chunks.values()]
        cached = [self._lengths[row] for row in rows]
        updates = [self._grow(row, count) for row, count in zip(rows, extend, strict=True)]
        hidden = {*unfinished, *unwritten}
        self._num_steps += 1
        return StepPlan(
            step_id=self._num_steps,
            num_decode=len(decode),
            rows=_int32(rows),
            cached_lens=_int32(cached),
            extend_lens=_int32(extend),
            prefill_token_ids=_int32([token for chunk in chunks.values() for token in chunk]),
            write_rows=_int32([self._max_rows if row in hidden else row for row in rows]),
            samples=np.array([row not in unfinished for row in rows], np.bool_),
            prompt_lens=_int32([0] * len(rows)),
            page_rows=_int32([row for update in updates for row, _, _ in update]),
            page_columns=_int32([column for update in updates for _, column, _ in update]),
            page_ids=_int32([page for update in updates for _, _, page in update]),
            sampling=sampling_batch([(sampling or {}).get(row, GREEDY) for row in rows]),
        )

    def _grow(self, row: int, num_tokens: int) -> list[tuple[int, int, int]]:
        self._lengths[row] += num_tokens
        updates = []
        while self._num_pages[row] * self._page_size < self._lengths[row]:
            updates.append((row, self._num_pages[row], self._free.pop()))
            self._num_pages[row] += 1
        return updates


def sampling_batch(params: Sequence[SamplingParams]) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.array([one.temperature for one in params], np.float32),
        top_k=_int32([one.top_k for one in params]),
        top_p=np.array([one.top_p for one in params], np.float32),
        min_p=np.array([one.min_p for one in params], np.float32),
        seeds=np.array([one.seed for one in params], np.uint64),
        is_greedy=np.array([one.is_greedy for one in params], np.bool_),
    )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)
