"""The contract between scheduler and engine: frozen, numpy only, struct of arrays.

A plan speaks of lengths and places, never of the values that a step still in flight
will sample: a decode row's input is read by the engine from its own token pool, where
the step before wrote it. That is what lets step N+1 be planned while N runs.

Neither side changes an array of a plan afterwards; plans may have arrays in common.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
# What an array is indexed by again and again: numpy makes one of these of any other type first,
# which takes several times as long as reading the elements.
IndexArray = NDArray[np.intp]


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
class RowOpening:
    """How a row's logits are adjusted, told once: with the first step of the row's request.

    What changes from token to token, which is how often each was sampled, the engine keeps
    up by itself in the step that samples. A draw is from
    1. the model's logits, but -inf for ids that are not allowed and for banned ones;
    2. plus the bias;
    3. of each id among all tokens so far, divided by the repetition penalty if positive and
       else multiplied by it;
    4. minus frequency penalty * count and presence penalty * (count > 0), where count is how
       often the id was sampled, the prompt aside;
    and then come temperature and filters. A request that was preempted is told anew.
    """

    row: int
    # All known tokens; those from prompt_len on were sampled.
    token_ids: Int32Array
    prompt_len: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    # [num_biases] each; no id twice.
    bias_ids: Int32Array
    bias_values: Float32Array
    # None: every id.
    allowed_ids: Int32Array | None
    # Ids that cannot stand at any position before min_len.
    banned_ids: Int32Array
    min_len: int


@dataclass(frozen=True, slots=True)
class LogprobsPlan:
    """Which log-probabilities a step owes; see TokenLogprobs."""

    # Indices of the plan's rows, all of which sample, whose sampled token is to be given.
    rows: Int32Array
    # Likeliest tokens for each of those: the most that one of the rows asks for.
    num_top: int
    # [num_prompt_entries] places among the step's input tokens (decode rows come first, one
    # each) whose logits are asked for, in rising order, and the prompt's token after each.
    prompt_inputs: Int32Array
    prompt_targets: Int32Array
    num_prompt_top: int
    # Indices of the plan's rows that the entries belong to, in order, and how many each has.
    prompt_rows: Int32Array
    prompt_counts: Int32Array


def _no_indices() -> Int32Array:
    return np.empty(0, np.int32)


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
    # page_table[page_rows, page_columns] = page_ids. No entry twice; those of a
    # row's step are repeated in its next one, should the first fail before it set them.
    page_rows: Int32Array
    page_columns: Int32Array
    page_ids: Int32Array
    sampling: SamplingBatch
    # Rows of this plan that are adjusted from now on. Should a step fail before it took its
    # openings, later plans may still name those rows as adjusted: their requests have ended
    # and what they sample is not read, but it must do no harm.
    openings: tuple[RowOpening, ...] = ()
    # Indices of the plan's rows, all of which sample: those whose logits are adjusted by what
    # their opening said, and those that wait for a mask (StepHandle.provide_masks). Rising.
    adjusted: Int32Array = field(default_factory=_no_indices)
    masked: Int32Array = field(default_factory=_no_indices)
    logprobs: LogprobsPlan | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + len(self.prefill_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entry i is one token, by the model's own logits: log_softmax in float32, before
    temperature, adjustments, masks and filters."""

    logprobs: Float32Array
    # 1 + the number of tokens with a strictly greater logit.
    ranks: Int32Array
    # [num_entries, num_top] likeliest first; of equal ones the lowest id first.
    top_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What a step owed; an engine without logits gives entries without top ones."""

    # For LogprobsPlan.rows; None if there are none.
    sampled: TokenLogprobs | None
    # For LogprobsPlan.prompt_targets; None if there are none.
    prompt: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, one entry for each row of its plan, in its order."""

    token_ids: Int32Array
    # Logits were not finite: the row's request ends with INTERNAL.
    faulty: BoolArray
    # time.monotonic() at the device: begin and end of the step's work.
    started_at: float
    finished_at: float
    # Not None if the plan asked for any.
    logprobs: StepLogprobs | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the scheduler must know of an engine."""

    num_pages: int
    page_size: int
    max_rows: int
    # Most tokens (prompt and output) of one request.
    max_context: int
    vocab_size: int
    # False: it has no logits, so that nothing can be masked.
    has_logits: bool = True


class StepHandle(Protocol):
    """A step that was launched."""

    def mask_buffer(self) -> Int32Array | None:
        """Where masks are best written, for `provide_masks` need not copy them from there.

        [at least len(masked), ceil(vocab_size / 32)] of any content; the step's until it is
        given its masks. None: it makes no difference.
        """
        ...

    def provide_masks(self, bitmasks: Int32Array) -> None:
        """What each row of the plan's `masked` may sample; sampling waits for it.

        [len(masked), ceil(vocab_size / 32)]: bit b of word w set means that id 32 * w + b is
        allowed. Called exactly once, before `result`, for a step whose `masked` is not empty,
        and for no other. Either the first rows of `mask_buffer` or an array of the caller's, of
        which it copies what it needs before it returns; does not wait for the step.
        """
        ...

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
        """Waits for what is in flight and frees the device. Idempotent.

        A step that never got its masks is given up.
        """
        ...
