"""CUDA graphs of whole decode steps, and of what a step draws late, for a few batch sizes."""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.checkpoint.source import Progress


def graph_batch_sizes(max_batch: int) -> list[int]:
    """Fine where a step is short and its padding would be felt, coarse above."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    sizes += range(80, 257, 16)
    sizes += range(320, max_batch + 64, 64)
    return [size for size in sizes if size < max_batch] + [max_batch]


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a graph writes a result, in the words of the CUDA array interface.

    A tensor that owned the memory would keep it from the graphs captured later, which share
    it: a replay overwrites what the one before it left.
    """

    pointer: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, words: torch.Tensor) -> "_Address":
        return cls(words.data_ptr(), tuple(words.shape))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "<i2",
            "data": (self.pointer, False),
            "strides": None,
        }


@dataclass(frozen=True, slots=True)
class _BatchGraphs:
    """Those of one batch size."""

    step: torch.cuda.CUDAGraph
    masked_draw: torch.cuda.CUDAGraph
    # int16 words, in memory that is the graphs'.
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps. Inputs and outputs of all lie at the same addresses."""

    def __init__(self, batch_sizes: list[int]) -> None:
        self._batch_sizes = batch_sizes
        self._graphs: dict[int, _BatchGraphs] = {}

    def capture(
        self,
        prepare: Callable[[int], None],
        run: Callable[[int], torch.Tensor],
        draw_masked: Callable[[torch.Tensor], None],
        stream: torch.cuda.Stream,
        progress: Progress,
    ) -> None:
        """Captures `run(batch)` for every size, and `draw_masked` of the logits that it gives.

        The largest first, so that all share its memory. The logits must be the last memory that
        a run takes: it is not kept from what follows. A draw takes none. `prepare(batch)` sets
        inputs that a run can be tried with.
        """
        started_at = time.monotonic()
        before = torch.cuda.memory_reserved()
        pool = None
        sizes = sorted(self._batch_sizes, reverse=True)
        for done, batch in enumerate(sizes):
            progress(f"capturing decode graphs: {done} of {len(sizes)}, batch {batch}")
            # Once outside: compiles kernels and lets cuBLAS take its workspace.
            prepare(batch)
            draw_masked(run(batch))
            stream.synchronize()
            step, masked_draw = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(step, pool=pool, stream=stream):
                logits = run(batch)
            pool = pool or step.pool()
            with torch.cuda.graph(masked_draw, pool=pool, stream=stream):
                draw_masked(logits)
            address = _Address.of(logits.view(torch.int16))
            del logits
            words = torch.as_tensor(address, device=stream.device)
            self._graphs[batch] = _BatchGraphs(step, masked_draw, words)
        taken = (torch.cuda.memory_reserved() - before) >> 20
        seconds = time.monotonic() - started_at
        progress(f"captured graphs of {len(sizes)} batch sizes in {seconds:.1f} s, {taken} MiB")

    def batch_for(self, num_rows: int) -> int | None:
        """The smallest captured batch that holds the rows, if any does."""
        place = bisect_left(self._batch_sizes, num_rows)
        return self._batch_sizes[place] if place < len(self._batch_sizes) else None

    def replay(self, batch: int) -> torch.Tensor:
        """Queues the step on the current stream; its logits' words, valid until the next one."""
        graphs = self._graphs[batch]
        graphs.step.replay()
        return graphs.logits

    def draw_masked(self, batch: int) -> None:
        """Queues what the last step, of this batch, draws late."""
        self._graphs[batch].masked_draw.replay()

    def close(self) -> None:
        self._graphs.clear()
