"""What a step does beyond an ordinary draw: adjusted logits, late masks, log-probabilities.

The step itself, which a graph may hold, is the same for all: each row draws from the model's
own logits, at once or when its mask is there. Adjusted rows draw a second time, from a float32
copy of theirs, and their tokens take the place of the first ones before the next step reads
them. So a step that asks for nothing has nothing of this.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.engine.cuda.logits import as_words
from worker.engine.cuda.logprobs import Logprobs, entry_words, from_words
from worker.engine.cuda.masks import Masks
from worker.engine.cuda.packing import Features
from worker.engine.cuda.row_params import RowParams
from worker.engine.cuda.row_state import RowState
from worker.engine.cuda.sampling import Sampler
from worker.engine.cuda.staging import POSITIONS, ROWS, WRITE_ROWS, align_words
from worker.step import EngineInfo, StepLogprobs


@dataclass(slots=True)
class FeaturedStep:
    """A plan's features on the device, and where their results come to the host."""

    features: Features
    words: torch.Tensor
    # Pinned [num_entries, entry_words(·)] each; None if nothing was asked for.
    sampled: torch.Tensor | None = None
    prompt: torch.Tensor | None = None

    def logprobs(self) -> StepLogprobs | None:
        """Once the step is over."""
        sampled, prompt = (
            None if words is None else from_words(words.numpy(), num_top)
            for words, num_top in (
                (self.sampled, self.features.num_top),
                (self.prompt, self.features.num_prompt_top),
            )
        )
        if sampled is None and prompt is None:
            return None
        return StepLogprobs(sampled, prompt)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What an ordinary step leaves: its inputs, its logits, and its tokens but for those that wait
    for masks."""

    # [NUM_FIELDS, num_columns]
    row_block: torch.Tensor
    # [num_rows and padding, vocab_size], bfloat16 or its words
    logits: torch.Tensor
    token_ids: torch.Tensor
    token_pool: torch.Tensor


class FeaturedSampling:
    """State and space of the rows with features; every call queues on the current stream."""

    def __init__(self, info: EngineInfo, sampler: Sampler, device: torch.device) -> None:
        num_rows, vocab_size = align_words(info.max_rows), info.vocab_size
        self.masks = Masks(info.max_rows, vocab_size, device)
        self._sampler = sampler
        self._state = RowState(info.max_rows, vocab_size, device)
        self._logprobs = Logprobs(num_rows, vocab_size, device)
        self._adjusted = torch.zeros(info.max_rows, vocab_size, device=device)
        self._drawn = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._rows = torch.arange(num_rows, dtype=torch.int32, device=device)

    def open(self, features: Features, words: torch.Tensor) -> FeaturedStep:
        """Takes the plan's openings, before anything of the step can fail.

        `words` are the features' on the device.
        """
        self._state.open(features, words)
        return FeaturedStep(features, words)

    def of_prompts(
        self,
        step: FeaturedStep,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`hidden` [num_tokens, hidden_size] is that of all the step's tokens.

        In slices of as many tokens as a step has rows, whose logits there is memory for.
        """
        features = step.features
        inputs, targets = step.words[features.prompt_inputs], step.words[features.prompt_targets]
        if len(inputs) == 0:
            return
        num_top, size = features.num_prompt_top, len(self._rows)
        step.prompt = _pinned(len(inputs), num_top)
        for begin in range(0, len(inputs), size):
            part = slice(begin, min(begin + size, len(inputs)))
            logits = as_words(logits_of(hidden.index_select(0, inputs[part])))
            words = self._logprobs.compute(
                logits, self._rows[: part.stop - begin], targets[part], num_top
            )
            step.prompt[part].copy_(words, non_blocking=True)

    def draw(self, step: FeaturedStep, outputs: StepOutputs) -> None:
        """Draws for the step's adjusted rows, then looks up what log-probabilities it owes.

        Rows with a late mask take it from `masks`, which must have been provided.
        """
        features = step.features
        if features.num_adjusted:
            self._draw_adjusted(step, outputs)
        rows = step.words[features.logprob_rows]
        if len(rows):
            words = self._logprobs.compute(
                as_words(outputs.logits),
                rows,
                outputs.token_ids.index_select(0, rows),
                features.num_top,
            )
            step.sampled = _pinned(len(rows), features.num_top)
            step.sampled.copy_(words, non_blocking=True)

    def last_adjusted(self, num_rows: int) -> torch.Tensor:
        """[num_rows, vocab_size] float32: what the adjusted rows of the last step drew from,
        but for their late masks."""
        return self._adjusted[:num_rows]

    def _draw_adjusted(self, step: FeaturedStep, outputs: StepOutputs) -> None:
        padded = step.words[step.features.adjusted]
        places = padded[: step.features.num_adjusted]
        # With the padding, so that each field is aligned.
        block = outputs.row_block.index_select(1, padded)
        adjusted = self.last_adjusted(len(places))
        self._state.adjust(
            adjusted,
            as_words(outputs.logits),
            places,
            rows=block[ROWS],
            positions=block[POSITIONS],
        )
        params = RowParams.of_block(block)
        into = block[WRITE_ROWS], outputs.token_pool, self._drawn
        self._sampler.sample(adjusted, params, *into)
        if step.features.has_masked:
            self._sampler.sample(adjusted, params, *into, self.masks.words)
        self._state.count(self._drawn, outputs.token_ids, places, block[ROWS])


def _pinned(num_entries: int, num_top: int) -> torch.Tensor:
    # From torch's cache of pinned memory, which waits for copies before it gives it again.
    size = (num_entries, entry_words(num_top))
    return torch.empty(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
