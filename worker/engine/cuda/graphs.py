"""CUDA graphs of decode steps, for each of a few batch sizes: the forward, and the draw.

In two, for the draw of a step may have to wait for masks.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.checkpoint.source import Progress


def graph_batch_sizes(max_batch: int) -> list[int]:
    """Fine where a step is short and its padding would be felt, coarse above."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    sizes += range(80, 257, 16)
    sizes += range(320, max_batch + 64, 64)
    return [size for size in sizes if size < max_batch] + [max_batch]


class Draw(Protocol):
    def __call__(self, logits: torch.Tensor, *, masked: bool) -> None:
        """Draws from logits [batch, vocab_size]; with `masked`, what the masks permit."""
        ...


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

    forward: torch.cuda.CUDAGraph
    # Without masks, and with.
    draws: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]
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
        forward: Callable[[int], torch.Tensor],
        draw: Draw,
        stream: torch.cuda.Stream,
        progress: Progress,
    ) -> None:
        """Captures `forward(batch)` and what draws from its logits for every size.

        The largest first, so that all share its memory. The logits must be the last memory that
        a forward takes: it is not kept from what follows. A draw takes none. `prepare(batch)`
        sets inputs that a step can be tried with.
        """
        started_at = time.monotonic()
        before = torch.cuda.memory_reserved()
        pool = None
        sizes = sorted(self._batch_sizes, reverse=True)
        for done, batch in enumerate(sizes):
            progress(f"capturing decode graphs: {done} of {len(sizes)}, batch {batch}")
            # Once outside: compiles kernels and lets cuBLAS take its workspace.
            prepare(batch)
            logits = forward(batch)
            for masked in (False, True):
                draw(logits, masked=masked)
            stream.synchronize()
            del logits
            forward_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward_graph, pool=pool, stream=stream):
                logits = forward(batch)
            pool = pool or forward_graph.pool()
            draw_graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            for graph, masked in zip(draw_graphs, (False, True), strict=True):
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    draw(logits, masked=masked)
            address = _Address.of(logits.view(torch.int16))
            del logits
            words = torch.as_tensor(address, device=stream.device)
            self._graphs[batch] = _BatchGraphs(forward_graph, draw_graphs, words)
        taken = (torch.cuda.memory_reserved() - before) >> 20
        seconds = time.monotonic() - started_at
        progress(f"captured graphs of {len(sizes)} batch sizes in {seconds:.1f} s, {taken} MiB")

    def batch_for(self, num_rows: int) -> int | None:
        """The smallest captured batch that holds the rows, if any does."""
        place = bisect_left(self._batch_sizes, num_rows)
        return self._batch_sizes[place] if place < len(self._batch_sizes) else None

    def forward(self, batch: int) -> torch.Tensor:
        """Queues it on the current stream; its logits' words, valid until the next one."""
        graphs = self._graphs[batch]
        graphs.forward.replay()
        return graphs.logits

    def draw(self, batch: int, *, masked: bool) -> None:
        """Queues what draws from the last forward's logits."""
        self._graphs[batch].draws[masked].replay()

    def close(self) -> None:
        self._graphs.clear()
