"""The worker's offline run, and prompts for it."""

import numpy as np

from worker.offline import Run, StepTimes, run_offline
from worker.step import Int32Array

__all__ = ["Run", "StepTimes", "random_prompt", "run_offline"]


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> Int32Array:
    return rng.integers(0, vocab_size, length).astype(np.int32)
