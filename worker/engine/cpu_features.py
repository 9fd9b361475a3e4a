"""What a CPU step does beyond an ordinary draw: adjusted logits, late masks, logprobs."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engine.adjustments import Adjustments, RowAdjustment, apply_masks
from worker.engine.logprobs import prompt_logprobs, token_logprobs
from worker.engine.sampling import sample
from worker.step import (
    Int32Array,
    LogprobsPlan,
    SamplingBatch,
    StepLogprobs,
    StepPlan,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """A plan's features, prepared in the caller's thread. Places are among sampling rows."""

    opened: tuple[RowAdjustment, ...]
    adjusted: Int32Array
    # Of each adjusted row: its number, and where its token will stand.
    adjusted_rows: Int32Array
    adjusted_positions: Int32Array
    masked: Int32Array
    # Comes from StepHandle.provide_masks; cancelled when the engine closes without it.
    bitmasks: "Future[Int32Array]"
    logprobs: LogprobsPlan | None
    sampled: Int32Array
    # [num_prompt_entries] of the plan's LogprobsPlan; None if there are none.
    prompt_inputs: Tensor | None
    prompt_targets: Tensor | None


def prepare(plan: StepPlan) -> StepFeatures | None:
    """None for an ordinary plan. In numpy, as all that does not run on the engine's thread."""
    asked = plan.logprobs
    if not (plan.openings or len(plan.adjusted) or len(plan.masked) or asked):
        return None
    places = (np.cumsum(plan.samples) - 1).astype(np.int32)
    has_prompts = asked is not None and len(asked.prompt_targets) > 0
    return StepFeatures(
        opened=tuple(RowAdjustment(opening) for opening in plan.openings),
        adjusted=places[plan.adjusted],
        adjusted_rows=plan.rows[plan.adjusted],
        adjusted_positions=(plan.cached_lens + plan.extend_lens)[plan.adjusted],
        masked=places[plan.masked],
        bitmasks=Future(),
        logprobs=asked,
        sampled=places[asked.rows] if asked else places[:0],
        prompt_inputs=_tensor(asked.prompt_inputs) if asked and has_prompts else None,
        prompt_targets=_tensor(asked.prompt_targets) if asked and has_prompts else None,
    )


class FeaturedSampling:
    """State of the rows that open with adjustments; belongs to the engine's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._adjustments = Adjustments()

    def open(self, features: StepFeatures) -> None:
        """Before anything of the step can fail, for later steps count on it."""
        self._adjustments.open(features.opened)

    def of_prompts(
        self, features: StepFeatures, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> TokenLogprobs | None:
        """`hidden` [num_tokens, hidden_size] is that of all the step's tokens."""
        if features.prompt_inputs is None or features.prompt_targets is None:
            return None
        assert features.logprobs is not None
        return prompt_logprobs(
            hidden.index_select(0, features.prompt_inputs),
            features.prompt_targets,
            logits_of,
            num_top=features.logprobs.num_prompt_top,
            vocab_size=self._vocab_size,
        )

    def sample(
        self, features: StepFeatures, logits: Tensor, positions: Int32Array, batch: SamplingBatch
    ) -> tuple[Tensor, Tensor, TokenLogprobs | None]:
        """As `sampling.sample`, and the log-probabilities of the rows that asked for them.

        May change `logits`. Waits for the masks, if the step has masked rows. Raises
        CancelledError if they never come.
        """
        # What the model said, and the likeliest of it, does not depend on masks or draws.
        own = logits[torch.from_numpy(features.sampled)] if len(features.sampled) else None
        touched = np.union1d(features.adjusted, features.masked)
        if not len(touched):
            tokens, faulty = sample(logits, positions, batch)
        else:
            # Exact, so that other rows draw as they would alone.
            logits = logits.float()
            values = logits.numpy()
            highest = logits[torch.from_numpy(touched)].max(dim=-1).values
            self._adjustments.apply(
                values, features.adjusted, features.adjusted_rows, features.adjusted_positions
            )
            if len(features.masked):
                apply_masks(values, features.masked, features.bitmasks.result())
            tokens, faulty = sample(logits, positions, batch)
            # What the model said may be unsound although what is left of it is not.
            faulty[torch.from_numpy(touched)] |= ~torch.isfinite(highest)
            self._adjustments.count(features.adjusted_rows, tokens.numpy()[features.adjusted])
        if own is None:
            return tokens, faulty, None
        assert features.logprobs is not None
        chosen = tokens[torch.from_numpy(features.sampled)]
        return tokens, faulty, token_logprobs(own, chosen, features.logprobs.num_top)


def step_logprobs(
    features: StepFeatures, sampled: TokenLogprobs | None, prompt: TokenLogprobs | None
) -> StepLogprobs | None:
    return None if features.logprobs is None else StepLogprobs(sampled, prompt)


def _tensor(array: Int32Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
