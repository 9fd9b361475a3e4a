"""A step that was launched: what of it is queued, and what of it waits for its masks."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.errors import EngineError
from worker.engine.cuda.clock import DeviceClock, StepTiming
from worker.engine.cuda.features import FeaturedStep, StepOutputs
from worker.engine.cuda.staging import Slot
from worker.step import Int32Array, StepResult


@dataclass(frozen=True, slots=True)
class Results:
    """Where a step's results will be once its end event has fired."""

    # Pinned.
    host_token_ids: torch.Tensor
    timing: StepTiming
    featured: FeaturedStep | None


@dataclass(frozen=True, slots=True)
class Undrawn:
    """A step of which all is queued but what it draws late."""

    outputs: StepOutputs
    num_masked: int
    # Whose graph draws; None: no graph does.
    graph_batch: int | None
    featured: FeaturedStep | None
    # Holds the features' words until they are read.
    slot: Slot


class StepQueue(Protocol):
    """What a step asks of its engine."""

    clock: DeviceClock

    def fault(self, error: RuntimeError) -> EngineError: ...

    def mask_buffer(self) -> Int32Array | None: ...

    def draw_masked(self, undrawn: Undrawn, bitmasks: Int32Array, results: Results) -> None:
        """Queues the rest of a step that waited for masks. Raises EngineError."""
        ...

    def resume(self) -> None:
        """Queues what was launched behind the step that waited."""
        ...


class CudaStep:
    """A step that was launched; the engine says what became of it."""

    def __init__(self, queue: StepQueue) -> None:
        self._queue = queue
        self._results: Results | None = None
        self._undrawn: Undrawn | None = None
        self._error: EngineError | None = None

    def queued(self, results: Results, undrawn: Undrawn | None = None) -> None:
        """All of it is on the device, but for what is undrawn."""
        self._results, self._undrawn = results, undrawn

    def failed(self, error: EngineError) -> None:
        """It ends so in its turn."""
        self._error = error

    def mask_buffer(self) -> Int32Array | None:
        return self._queue.mask_buffer()

    def provide_masks(self, bitmasks: Int32Array) -> None:
        if self._error is not None:
            return
        assert self._undrawn is not None, "a step has its masks, or needs none"
        assert self._results is not None
        # Once drawn, the logits need not be kept.
        undrawn, self._undrawn = self._undrawn, None
        try:
            self._queue.draw_masked(undrawn, bitmasks, self._results)
        except EngineError as error:
            self.failed(error)
        self._queue.resume()

    def result(self) -> StepResult:
        if self._error is not None:
            raise self._error
        results = self._results
        assert results is not None and self._undrawn is None, "masks come before results"
        waited_from = time.monotonic()
        try:
            results.timing.end.synchronize()
            times = self._queue.clock.times(
                results.timing, waited_from=waited_from, now=time.monotonic()
            )
        except RuntimeError as error:
            raise self._queue.fault(error) from error
        token_ids = results.host_token_ids.numpy().copy()
        faulty = token_ids < 0
        token_ids[faulty] = 0
        logprobs = None if results.featured is None else results.featured.logprobs()
        return StepResult(token_ids, faulty, *times, logprobs)
