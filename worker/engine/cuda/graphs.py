"""CUDA graphs of whole decode steps, one for each of a few batch sizes."""

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


class DecodeGraphs:
    """Captured decode steps. Inputs and outputs of all lie at the same addresses."""

    def __init__(self, batch_sizes: list[int]) -> None:
        self._batch_sizes = batch_sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # int16 words of each graph's logits, in memory that is the graphs'.
        self._logits: dict[int, torch.Tensor] = {}

    def capture(
        self,
        prepare: Callable[[int], None],
        run: Callable[[int], torch.Tensor],
        stream: torch.cuda.Stream,
        progress: Progress,
    ) -> None:
        """Captures `run(batch)` for every size, largest first so that all share its memory.

        A run gives its logits, which must be the last memory that it takes: it is not kept
        from what follows. `prepare(batch)` sets inputs that a run can be tried with.
        """
        started_at = time.monotonic()
        before = torch.cuda.memory_reserved()
        pool = None
        sizes = sorted(self._batch_sizes, reverse=True)
        for done, batch in enumerate(sizes):
            progress(f"capturing decode graphs: {done} of {len(sizes)}, batch {batch}")
            # Once outside: compiles kernels and lets cuBLAS take its workspace.
            prepare(batch)
            run(batch)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = run(batch).view(torch.int16)
            pool = pool or graph.pool()
            self._graphs[batch] = graph
            address = _Address.of(logits)
            del logits
            self._logits[batch] = torch.as_tensor(address, device=stream.device)
        taken = (torch.cuda.memory_reserved() - before) >> 20
        seconds = time.monotonic() - started_at
        progress(f"captured {len(sizes)} decode graphs in {seconds:.1f} s, {taken} MiB")

    def batch_for(self, num_rows: int) -> int | None:
        """The smallest captured batch that holds the rows, if any does."""
        place = bisect_left(self._batch_sizes, num_rows)
        return self._batch_sizes[place] if place < len(self._batch_sizes) else None

    def replay(self, batch: int) -> torch.Tensor:
        """Queues the step on the current stream; its logits' words, valid until the next one."""
        self._graphs[batch].replay()
        return self._logits[batch]

    def close(self) -> None:
        self._logits.clear()
        self._graphs.clear()
