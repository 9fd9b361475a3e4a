"""Plans that run every kernel once and change nothing, so that no request waits for a compiler."""

from dataclasses import replace

import numpy as np

from worker.step import LogprobsPlan, RowOpening, SamplingBatch, StepPlan


def dummy_plan(dummy_row: int, *, num_decode: int) -> StepPlan:
    """A step of so many decode rows and one prefill row, all the dummy row: it changes nothing."""
    num_rows = num_decode + 1
    rows = np.full(num_rows, dummy_row, np.int32)
    zeros = np.zeros(num_rows, np.int32)
    nothing = np.empty(0, np.int32)
    ones = np.ones(num_rows, np.float32)
    return StepPlan(
        step_id=-1,
        num_decode=num_decode,
        rows=rows,
        cached_lens=zeros,
        extend_lens=np.ones(num_rows, np.int32),
        prefill_token_ids=np.zeros(1, np.int32),
        write_rows=rows,
        samples=np.ones(num_rows, np.bool_),
        prompt_lens=zeros,
        page_rows=nothing,
        page_columns=nothing,
        page_ids=nothing,
        sampling=SamplingBatch(
            temperature=ones,
            top_k=zeros,
            top_p=ones,
            min_p=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.uint64),
            is_greedy=np.ones(num_rows, np.bool_),
        ),
    )


def featured_plan(dummy_row: int) -> StepPlan:
    """A decode row and a prefill row with all features, the first of which waits for a mask."""
    plan = dummy_plan(dummy_row, num_decode=1)
    zero = np.zeros(1, np.int32)
    opening = RowOpening(
        row=dummy_row,
        token_ids=np.zeros(2, np.int32),
        prompt_len=1,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        bias_ids=zero,
        bias_values=np.ones(1, np.float32),
        allowed_ids=zero,
        banned_ids=zero,
        min_len=0,
    )
    logprobs = LogprobsPlan(
        rows=zero,
        num_top=1,
        prompt_inputs=np.ones(1, np.int32),
        prompt_targets=zero,
        num_prompt_top=1,
        prompt_rows=np.ones(1, np.int32),
        prompt_counts=np.ones(1, np.int32),
    )
    # With filters, of which an entry's bound is searched.
    sampling = replace(
        plan.sampling,
        top_k=np.ones(2, np.int32),
        top_p=np.full(2, 0.5, np.float32),
        is_greedy=np.zeros(2, np.bool_),
    )
    return replace(
        plan,
        sampling=sampling,
        openings=(opening,),
        adjusted=np.arange(2, dtype=np.int32),
        masked=zero,
        logprobs=logprobs,
    )
