"""An engine that computes nothing: for measuring what the host alone costs."""

import time
from dataclasses import replace

import numpy as np

from worker.engine.echo import certain_logprobs
from worker.step import EngineInfo, Int32Array, StepPlan, StepResult


class NullEngine:
    """Answers every step at once with the same token."""

    def __init__(self, info: EngineInfo, *, token_id: int = 0) -> None:
        self._info = replace(info, has_logits=False)
        self._token_id = token_id

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan) -> "NullHandle":
        now = time.monotonic()
        return NullHandle(
            StepResult(
                token_ids=np.full(plan.num_rows, self._token_id, np.int32),
                faulty=np.zeros(plan.num_rows, np.bool_),
                started_at=now,
                finished_at=now,
                logprobs=certain_logprobs(plan.logprobs),
            )
        )

    def close(self) -> None:
        pass


class NullHandle:
    """A step that is over already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def mask_buffer(self) -> None:
        return None

    def provide_masks(self, bitmasks: Int32Array) -> None:
        pass

    def result(self) -> StepResult:
        return self._result
