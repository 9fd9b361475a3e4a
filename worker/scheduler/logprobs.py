"""From a step's log-probabilities to what each request is told of them."""

import numpy as np

from worker.messages import TokenLogprobs
from worker.scheduler.rows import RowTable
from worker.step import BoolArray, Int32Array, StepLogprobs, StepPlan
from worker.step import TokenLogprobs as StepTokenLogprobs


def of_sampled(
    plan: StepPlan, logprobs: StepLogprobs, token_ids: Int32Array, shown: BoolArray, rows: RowTable
) -> TokenLogprobs | None:
    """Those of the sampled tokens that are `shown`, [num_rows] of the plan."""
    asked = plan.logprobs
    if asked is None or logprobs.sampled is None:
        return None
    places = np.flatnonzero(shown[asked.rows])
    if not len(places):
        return None
    indices = asked.rows[places]
    of_plan = plan.rows[indices]
    return _told(
        _taken(logprobs.sampled, places),
        is_prompt=False,
        uids=rows.uids[of_plan],
        token_ids=token_ids[indices],
        num_top=rows.features.num_logprobs[of_plan],
    )


def of_prompts(
    plan: StepPlan, logprobs: StepLogprobs, told: BoolArray, rows: RowTable
) -> TokenLogprobs | None:
    """Those of the prompts of rows that are `told`, [num_rows] of the plan."""
    asked = plan.logprobs
    if asked is None or logprobs.prompt is None:
        return None
    entry_rows = np.repeat(asked.prompt_rows, asked.prompt_counts)
    places = np.flatnonzero(told[entry_rows])
    if not len(places):
        return None
    of_plan = plan.rows[entry_rows[places]]
    return _told(
        _taken(logprobs.prompt, places),
        is_prompt=True,
        uids=rows.uids[of_plan],
        token_ids=asked.prompt_targets[places],
        num_top=rows.features.num_prompt_logprobs[of_plan],
    )


def without_numbers(plan: StepPlan, logprobs: StepLogprobs) -> BoolArray:
    """[num_rows] of the plan: whose prompt has a NaN among its log-probabilities."""
    found = np.zeros(plan.num_rows, np.bool_)
    if plan.logprobs is not None and logprobs.prompt is not None:
        entry_rows = np.repeat(plan.logprobs.prompt_rows, plan.logprobs.prompt_counts)
        found[entry_rows[np.isnan(logprobs.prompt.logprobs)]] = True
    return found


def _taken(entries: StepTokenLogprobs, places: np.ndarray) -> StepTokenLogprobs:
    return StepTokenLogprobs(
        logprobs=entries.logprobs[places],
        ranks=entries.ranks[places],
        top_ids=entries.top_ids[places],
        top_logprobs=entries.top_logprobs[places],
    )


def _told(
    entries: StepTokenLogprobs,
    *,
    is_prompt: bool,
    uids: np.ndarray,
    token_ids: Int32Array,
    num_top: Int32Array,
) -> TokenLogprobs:
    return TokenLogprobs(
        is_prompt=is_prompt,
        uids=uids,
        token_ids=token_ids,
        logprobs=entries.logprobs,
        ranks=entries.ranks,
        # An engine without logits has no likeliest ones to give.
        num_top=np.minimum(num_top, entries.top_ids.shape[1]),
        top_ids=entries.top_ids,
        top_logprobs=entries.top_logprobs,
    )
