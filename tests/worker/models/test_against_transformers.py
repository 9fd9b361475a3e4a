"""Every architecture gives transformers' logits, through the engine's paged attention."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.worker.engine.plans import PlanBuilder
from tests.worker.models.tiny import SHAPES, VOCAB_SIZE, Shape, load_tiny, write_checkpoint
from worker.engine.cpu_attention import AttentionPlanner, PagedAttention
from worker.engine.kv_pool import KVPool
from worker.models.decoder import Decoder
from worker.step import StepPlan

_MAX_ROWS = 8
_NUM_SLOTS = 1024


class PagedModel:
    """A model over the CPU engine's attention that gives the logits of every token."""

    def __init__(self, model: Decoder, page_size: int) -> None:
        pool = KVPool(model.config, num_slots=_NUM_SLOTS, dtype=model.dtype)
        self._model = model
        self._attention = PagedAttention(model.config, pool)
        self._planner = AttentionPlanner(
            model.config, page_size=page_size, max_rows=_MAX_ROWS, max_context=256
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] in the plan's order."""
        positions = np.concatenate(
            [
                np.arange(cached, cached + extend)
                for cached, extend in zip(plan.cached_lens, plan.extend_lens, strict=True)
            ]
        )
        self._attention.use(self._planner.plan(plan, positions))
        hidden = self._model(torch.tensor(token_ids), torch.from_numpy(positions), self._attention)
        return self._model.logits(hidden)


def _random_ids(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


@torch.no_grad()
def _reference(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= 1e-4 * max(1.0, scale)


@pytest.mark.parametrize("prepack", [False, True], ids=["plain", "prepacked"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_of_chunks_and_decode_steps_equal_those_of_one_pass(
    tmp_path: Path, shape: Shape, page_size: int, prepack: bool
) -> None:
    reference = write_checkpoint(tmp_path, shape)
    paged = PagedModel(load_tiny(tmp_path, prepack=prepack), page_size)
    builder = PlanBuilder(
        page_size=page_size, num_pages=_NUM_SLOTS // page_size, max_rows=_MAX_ROWS
    )
    ids = [_random_ids(length, seed=length) for length in (60, 37, 90)]
    expected = [_reference(reference, row) for row in ids]

    # Three rows of different lengths: a whole prompt, two chunks, and a late comer.
    first = paged.logits(
        builder.plan(prefill={0: ids[0][:50], 1: ids[1][:16]}, unfinished=[1]),
        ids[0][:50] + ids[1][:16],
    )
    _assert_close(first, torch.cat((expected[0][:50], expected[1][:16])))
    mixed = paged.logits(
        builder.plan(decode=[0], prefill={1: ids[1][16:30], 2: ids[2][:80]}),
        [ids[0][50], *ids[1][16:30], *ids[2][:80]],
    )
    _assert_close(mixed, torch.cat((expected[0][50:51], expected[1][16:30], expected[2][:80])))
    for step in range(7):
        decoded = paged.logits(
            builder.plan(decode=[2, 0, 1]),
            [ids[2][80 + step], ids[0][51 + step], ids[1][30 + step]],
        )
        wanted = [expected[2][80 + step], expected[0][51 + step], expected[1][30 + step]]
        _assert_close(decoded, torch.stack(wanted))
    alone = paged.logits(builder.plan(decode=[2]), [ids[2][87]])
    _assert_close(alone, expected[2][87:88])


def test_rows_of_very_different_lengths_are_grouped_and_still_right(tmp_path: Path) -> None:
    shape = SHAPES[0]
    reference = write_checkpoint(tmp_path, shape)
    paged = PagedModel(load_tiny(tmp_path, prepack=True), page_size=16)
    builder = PlanBuilder(page_size=16, num_pages=_NUM_SLOTS // 16, max_rows=_MAX_ROWS)
    lengths = [3, 240, 5, 200, 4, 6]
    ids = [_random_ids(length + 1, seed=length) for length in lengths]
    prompts = {row: row_ids[:-1] for row, row_ids in enumerate(ids)}
    paged.logits(builder.plan(prefill=prompts), [token for p in prompts.values() for token in p])
    decoded = paged.logits(builder.plan(decode=list(prompts)), [row[-1] for row in ids])
    _assert_close(decoded, torch.stack([_reference(reference, row)[-1] for row in ids]))
