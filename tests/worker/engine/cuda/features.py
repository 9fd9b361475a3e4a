"""Steps of rows with features, without a model: logits at random, both engines' sampling."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from worker.engine.adjustments import RowAdjustment, apply_masks
from worker.engine.cuda.features import FeaturedSampling, FeaturedStep, StepOutputs
from worker.engine.cuda.packing import pack
from worker.engine.cuda.row_params import RowParams
from worker.engine.cuda.row_state import mask_words
from worker.engine.cuda.sampling import Sampler
from worker.engine.cuda.staging import WRITE_ROWS, align_words, padding_block, write_rows
from worker.engine.cuda.warm_up import dummy_plan
from worker.engine.sampling import sample
from worker.step import (
    EngineInfo,
    Int32Array,
    LogprobsPlan,
    RowOpening,
    SamplingBatch,
    StepLogprobs,
    StepPlan,
    TokenLogprobs,
)

VOCAB_SIZE = 1777
MAX_ROWS = 12
_NO_IDS = np.empty(0, np.int32)


def opening(row: int, token_ids: Sequence[int], prompt_len: int) -> RowOpening:
    """One that changes nothing."""
    return RowOpening(
        row=row,
        token_ids=np.array(token_ids, np.int32),
        prompt_len=prompt_len,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        bias_ids=_NO_IDS,
        bias_values=np.empty(0, np.float32),
        allowed_ids=None,
        banned_ids=_NO_IDS,
        min_len=0,
    )


def logprobs_plan(rows: Sequence[int], num_top: int) -> LogprobsPlan:
    """Of sampled tokens alone."""
    return LogprobsPlan(
        rows=np.array(rows, np.int32),
        num_top=num_top,
        prompt_inputs=_NO_IDS,
        prompt_targets=_NO_IDS,
        num_prompt_top=0,
        prompt_rows=_NO_IDS,
        prompt_counts=_NO_IDS,
    )


def decode_plan(rows: Int32Array, lens: Int32Array, sampling: SamplingBatch) -> StepPlan:
    return replace(
        dummy_plan(MAX_ROWS, num_decode=len(rows)),
        rows=rows,
        num_decode=len(rows),
        cached_lens=lens - 1,
        extend_lens=np.ones(len(rows), np.int32),
        prefill_token_ids=np.empty(0, np.int32),
        write_rows=rows,
        samples=np.ones(len(rows), np.bool_),
        sampling=sampling,
    )


def random_masks(rng: np.random.Generator, count: int) -> Int32Array:
    size = (count, mask_words(VOCAB_SIZE))
    return rng.integers(-(2**31), 2**31, size).astype(np.int32)


class Device:
    """What of the CUDA engine comes after the logits."""

    def __init__(self, device: torch.device) -> None:
        info = EngineInfo(
            num_pages=1, page_size=16, max_rows=MAX_ROWS, max_context=64, vocab_size=VOCAB_SIZE
        )
        self._device = device
        self._sampler = Sampler(MAX_ROWS, VOCAB_SIZE, device)
        self.featured = FeaturedSampling(info, self._sampler, device)
        self.token_pool = torch.zeros(MAX_ROWS + 1, dtype=torch.int32, device=device)

    def step(
        self, plan: StepPlan, logits: torch.Tensor, bitmasks: Int32Array | None = None
    ) -> tuple[Int32Array, StepLogprobs | None]:
        """Tokens, FAULTY ones included, of bfloat16 logits [num_rows, vocab_size]."""
        logits = logits.to(self._device)
        block = padding_block(MAX_ROWS, align_words(plan.num_rows))
        write_rows(block.numpy(), plan)
        block = block.to(self._device)
        token_ids = torch.zeros(align_words(plan.num_rows), dtype=torch.int32, device=self._device)
        featured = self._open(plan)
        params = RowParams.of_block(block)
        into = params, block[WRITE_ROWS], self.token_pool, token_ids
        self._sampler.sample(logits, *into)
        if bitmasks is not None:
            masks = self.featured.masks.words
            masks[: len(bitmasks)] = torch.from_numpy(bitmasks)
            self._sampler.sample(logits, *into, masks)
        if featured is None:
            return token_ids[: plan.num_rows].cpu().numpy(), None
        self.featured.draw(featured, StepOutputs(block, logits, token_ids, self.token_pool))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return token_ids[: plan.num_rows].cpu().numpy(), featured.logprobs()

    def prompt(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> TokenLogprobs:
        """Log-probabilities of the plan's prompt entries."""
        featured = self._open(plan)
        assert featured is not None
        self.featured.of_prompts(featured, hidden, logits_of)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        logprobs = featured.logprobs()
        assert logprobs is not None
        assert logprobs.prompt is not None
        return logprobs.prompt

    def _open(self, plan: StepPlan) -> FeaturedStep | None:
        features = pack(plan, VOCAB_SIZE)
        if features is None:
            return None
        return self.featured.open(features, torch.from_numpy(features.words).to(self._device))


class Reference:
    """The same by what the CPU engine is made of."""

    def __init__(self) -> None:
        self._rows: dict[int, RowAdjustment] = {}

    def logits(
        self, plan: StepPlan, logits: torch.Tensor, bitmasks: Int32Array | None = None
    ) -> torch.Tensor:
        """Adjusted and masked, of bfloat16 logits [num_rows, vocab_size]."""
        for one in plan.openings:
            self._rows[one.row] = RowAdjustment(one)
        adjusted = logits.float()
        values, lens = adjusted.numpy(), plan.cached_lens + plan.extend_lens
        for place in plan.adjusted.tolist():
            self._rows[plan.rows[place]].apply(values[place], int(lens[place]))
        if bitmasks is not None:
            apply_masks(values, plan.masked, bitmasks)
        return adjusted

    def draw(self, plan: StepPlan, adjusted: torch.Tensor) -> Int32Array:
        token_ids = sample(adjusted, plan.cached_lens + plan.extend_lens, plan.sampling)[0].numpy()
        for place in plan.adjusted.tolist():
            self._rows[plan.rows[place]].count(int(token_ids[place]))
        return token_ids.astype(np.int32)
