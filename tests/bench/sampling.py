"""Device time of sampling, apart from the model: `python -m tests.bench.sampling`.

Each way of sampling is captured in a CUDA graph and replayed, so that the host's launches do
not count. Logits are normal, which is flatter than a trained model's: nuclei are large.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from worker.engine.cuda.bounds import Bounds
from worker.engine.cuda.clock import timing_event
from worker.engine.cuda.features import FeaturedSampling, StepOutputs
from worker.engine.cuda.logits import as_words
from worker.engine.cuda.logprobs import Logprobs
from worker.engine.cuda.packing import pack
from worker.engine.cuda.row_params import RowParams
from worker.engine.cuda.sampling import Sampler
from worker.engine.cuda.staging import WRITE_ROWS, align_words, padding_block, write_rows
from worker.engine.cuda.warm_up import dummy_plan
from worker.step import EngineInfo, RowOpening, StepPlan

_MAX_ROWS = 256
_REPEATS = 20
_FILTERS = {
    "nothing": (0, 1.0),
    "top_p 0.9": (0, 0.9),
    "top_k 20, top_p 0.95": (20, 0.95),
    "top_k 5000": (5000, 1.0),
}


class Bench:
    """Logits of a batch, and every way to sample from them."""

    def __init__(self, vocab_size: int, batch: int, spread: float) -> None:
        device = torch.device("cuda")
        info = EngineInfo(
            num_pages=1, page_size=16, max_rows=_MAX_ROWS, max_context=64, vocab_size=vocab_size
        )
        torch.manual_seed(0)
        self._batch = batch
        self._vocab_size = vocab_size
        self._logits = (torch.randn(batch, vocab_size, device=device) * spread).bfloat16()
        self._sampler = Sampler(_MAX_ROWS, vocab_size, device)
        self._featured = FeaturedSampling(info, self._sampler, device)
        self._logprobs = Logprobs(_MAX_ROWS, vocab_size, device)
        self._bounds = Bounds(_MAX_ROWS, vocab_size, device)
        self._token_pool = torch.zeros(_MAX_ROWS + 1, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(_MAX_ROWS, dtype=torch.int32, device=device)

    def ways(self) -> Iterator[tuple[str, Callable[[], object]]]:
        words = as_words(self._logits)
        yield "draw", self._draw(self._plan())
        masked = replace(self._plan(), masked=np.arange(self._batch, dtype=np.int32))
        yield "masked draw", self._draw(masked, torch.full_like(self._featured.masks.words, -1))
        for name, (top_k, top_p) in _FILTERS.items():
            plan = self._plan(top_k, top_p)
            params = RowParams.of_block(self._block(plan))
            yield f"bounds, {name}", partial(self._bounds.find, words, params)
        entries = np.arange(self._batch, dtype=np.int32)
        yield "adjusted", self._featured_draw(replace(self._plan(), adjusted=entries))
        filtered = replace(self._plan(20, 0.95), adjusted=entries)
        yield "adjusted, top_k 20, top_p 0.95", self._featured_draw(filtered)
        filtered = replace(self._plan(0, 0.9), adjusted=entries)
        yield "adjusted, top_p 0.9", self._featured_draw(filtered)
        rows = torch.from_numpy(entries).cuda()
        yield "logprobs, 20", partial(self._logprobs.compute, words, rows, rows, 20)

    def _plan(self, top_k: int = 0, top_p: float = 1.0) -> StepPlan:
        batch = self._batch
        rows = np.arange(batch, dtype=np.int32)
        plan = dummy_plan(_MAX_ROWS, num_decode=batch - 1)
        sampling = replace(
            plan.sampling,
            temperature=np.full(batch, 0.6, np.float32),
            top_k=np.full(batch, top_k, np.int32),
            top_p=np.full(batch, top_p, np.float32),
            seeds=np.arange(batch, dtype=np.uint64),
            is_greedy=np.zeros(batch, np.bool_),
        )
        return replace(plan, rows=rows, write_rows=rows, sampling=sampling)

    def _block(self, plan: StepPlan) -> torch.Tensor:
        block = padding_block(_MAX_ROWS, align_words(self._batch))
        write_rows(block.numpy(), plan)
        return block.cuda()

    def _draw(self, plan: StepPlan, masks: torch.Tensor | None = None) -> Callable[[], None]:
        block = self._block(plan)
        params = RowParams.of_block(block)
        return lambda: self._sampler.sample(
            self._logits, params, block[WRITE_ROWS], self._token_pool, self._token_ids, masks
        )

    def _featured_draw(self, plan: StepPlan) -> Callable[[], None]:
        openings = tuple(map(_opening, range(self._batch)))
        features = pack(replace(plan, openings=openings), self._vocab_size)
        assert features is not None
        step = self._featured.open(features, torch.from_numpy(features.words).cuda())
        drawn = StepOutputs(self._block(plan), self._logits, self._token_ids, self._token_pool)
        return lambda: self._featured.draw(step, drawn)


def _opening(row: int) -> RowOpening:
    rng = np.random.default_rng(row)
    return RowOpening(
        row=row,
        token_ids=rng.integers(0, 10_000, 500).astype(np.int32),
        prompt_len=250,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        bias_ids=np.empty(0, np.int32),
        bias_values=np.empty(0, np.float32),
        allowed_ids=None,
        banned_ids=np.empty(0, np.int32),
        min_len=0,
    )


def _microseconds(run: Callable[[], object]) -> float:
    """Of one run in a replayed graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            run()
    begin, end = timing_event(), timing_event()
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / _REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--batches", default="1,8,32,256")
    parser.add_argument("--spread", type=float, default=2.0, help="deviation of the logits")
    args = parser.parse_args()
    for batch in map(int, args.batches.split(",")):
        with torch.inference_mode():
            for name, run in Bench(args.vocab_size, batch, args.spread).ways():
                print(f"batch {batch:3d}  {name:40s} {_microseconds(run):9.1f} us", flush=True)


if __name__ == "__main__":
    main()
