"""The contract between scheduler and engine: frozen, numpy only, struct of arrays.

A plan speaks of lengths and places, never of the values that a step still in flight
will sample: a decode row's input is read by the engine from its own token pool, where
the step before wrote it. That is what lets step N+1 be planned while N runs.

Every array of a plan is the plan's own copy; neither side changes it afterwards.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of a step's rows, one entry for each; see SamplingParams."""

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seeds: NDArray[np.uint64]
    is_greedy: BoolArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward: `num_decode` decode rows first, then prefill chunks.

    Row i computes `extend_lens[i]` new tokens at positions `cached_lens[i]` onwards; KV of
    the earlier positions is in the pages that the page table gives its row. The token it
    samples stands at position cached_lens[i] + extend_lens[i].
    """

    step_id: int
    num_decode: int
    # [num_rows] rows of the page table and of the token pool.
    rows: Int32Array
    cached_lens: Int32Array
    # 1 for every decode row.
    extend_lens: Int32Array
    # [sum of extend_lens of the prefill rows]; decode rows read the token pool instead.
    prefill_token_ids: Int32Array
    # [num_rows] entry of the token pool that takes the sampled token. The sentinel max_rows
    # (the pool has one entry more than rows) takes what nobody may read: unfinished chunks
    # and rows that end with this token.
    write_rows: Int32Array
    # [num_rows] False for an unfinished chunk: its token is not computed or not meaningful.
    samples: BoolArray
    # [num_rows] length of the client's prompt; positions from there on are output.
    prompt_lens: Int32Array
    # [num_new_pages] entries of the page table to set before the step runs:
    # page_table[page_rows, page_columns] = page_ids. No entry twice; those of a step that was
    # in flight when this one was planned are repeated, should that step fail before it set them.
    page_rows: Int32Array
    page_columns: Int32Array
    page_ids: Int32Array
    sampling: SamplingBatch

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + len(self.prefill_token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, one entry for each row of its plan, in its order."""

    token_ids: Int32Array
    # Logits were not finite: the row's request ends with INTERNAL.
    faulty: BoolArray
    # time.monotonic() at the device: begin and end of the step's work.
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the scheduler must know of an engine."""

    num_pages: int
    page_size: int
    max_rows: int
    # Most tokens (prompt and output) of one request.
    max_context: int
    vocab_size: int


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Blocks until the step's tokens are on the host. Raises EngineError."""
        ...


class Engine(Protocol):
    """Runs steps in the order of their launch."""

    @property
    def info(self) -> EngineInfo: ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queues a step and returns at once; at most one other may be in flight."""
        ...

    def close(self) -> None:
        """Waits for what is in flight and frees the device. Idempotent."""
        ...
