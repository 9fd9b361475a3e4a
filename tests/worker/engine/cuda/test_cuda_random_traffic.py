"""Ten thousand random submits and aborts through scheduler and CUDA engine; nothing leaks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shared.types import SamplingParams
from tests.worker.models.tiny import SHAPES, VOCAB_SIZE, write_checkpoint
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine, StepHandle, StepPlan

pytest.importorskip("flashinfer", reason="FlashInfer is an extra for machines with a GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from worker.checkpoint.open import open_checkpoint  # noqa: E402
from worker.engine.cuda.open import CudaOptions, open_cuda_engine  # noqa: E402

NUM_REQUESTS = 10_000
MAX_ROWS = 64


class Traffic:
    """A client at random over one scheduler, whose steps overlap as the engine loop's do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(7)
        config = SchedulerConfig(token_budget=512, max_running=MAX_ROWS)
        self.scheduler = Scheduler(config, engine.info, (2,))
        self._live: set[int] = set()
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        self.num_ended = 0
        self.num_steps = 0

    def run(self) -> None:
        next_uid = 1
        while next_uid <= NUM_REQUESTS or not self.scheduler.is_idle:
            for _ in range(int(self._rng.integers(0, 24))):
                if next_uid <= NUM_REQUESTS and len(self._live) < 4 * MAX_ROWS:
                    self.scheduler.add(self._request(next_uid), float(self.num_steps))
                    self._live.add(next_uid)
                    next_uid += 1
            self._abort_some()
            self._step()
            if self.num_steps % 50 == 0:
                self.scheduler.check_integrity()

    def _request(self, uid: int) -> NewRequest:
        rng = self._rng
        # A few beginnings are shared, so that the prefix cache has its part.
        beginning = np.full(int(rng.integers(0, 40)), 3 + int(rng.integers(0, 4)), np.int32)
        rest = rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 40))).astype(np.int32)
        return NewRequest(
            uid=uid,
            prompt_token_ids=np.concatenate((beginning, rest)),
            max_tokens=int(rng.integers(1, 30)),
            sampling=SamplingParams(temperature=float(rng.choice([0.0, 1.0])), seed=uid),
        )

    def _abort_some(self) -> None:
        if self._live and self._rng.random() < 0.5:
            chosen = self._rng.choice(sorted(self._live), 3)
            self.scheduler.abort(set(chosen.tolist()), report=True, now=float(self.num_steps))

    def _step(self) -> None:
        now = float(self.num_steps)
        self.num_steps += 1
        plan = self.scheduler.plan(now)
        launched = None if plan is None else (plan, self._engine.launch(plan))
        launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self.scheduler.commit(launched[0], launched[1].result(), now)
        output = self.scheduler.drain_output(now)
        if output is not None:
            assert not output.failed
            for finished in output.finished:
                self._live.remove(finished.uid)
                self.num_ended += 1


def test_ten_thousand_submits_and_aborts_leak_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPES[-2])
    checkpoint = open_checkpoint(
        str(tmp_path), cache_dir=tmp_path / "cache", progress=lambda message: None
    )
    # So few pages that requests are preempted.
    options = CudaOptions(max_rows=MAX_ROWS, token_budget=512, kv_pages=96)
    engine = open_cuda_engine(checkpoint, options, lambda message: None)
    try:
        traffic = Traffic(engine)
        traffic.run()
    finally:
        engine.close()
    scheduler = traffic.scheduler
    scheduler.check_integrity()
    assert traffic.num_ended == NUM_REQUESTS
    scheduler.flush_cache()
    load = scheduler.load()
    print(f"{traffic.num_steps} steps, {load.preemptions} preemptions")
    assert load.pages_free == load.pages_total
