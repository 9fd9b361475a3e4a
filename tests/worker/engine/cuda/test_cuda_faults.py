"""A CUDA error under the engine loop: the step's requests end, then the process says why."""

import multiprocessing
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import Code
from tests.worker.models.tiny import SHAPES, write_checkpoint
from worker.engine_loop import EngineLoop
from worker.messages import Command, Event, Fatal, NewRequest, StepOutput, Submit
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine, EngineInfo, StepHandle, StepPlan

pytest.importorskip("flashinfer", reason="FlashInfer is an extra for machines with a GPU")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from worker.checkpoint.open import open_checkpoint  # noqa: E402
from worker.engine.cuda.open import CudaOptions, open_cuda_engine  # noqa: E402

POISONED_STEP = 5
NUM_REQUESTS = 4


class PoisoningEngine:
    """Gives one step a row far outside the page table, which the device cannot read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_launched = 0

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def launch(self, plan: StepPlan) -> StepHandle:
        self._num_launched += 1
        if self._num_launched == POISONED_STEP:
            plan = replace(plan, rows=np.full_like(plan.rows, 1 << 30))
        return self._engine.launch(plan)

    def close(self) -> None:
        self._engine.close()


class Commands:
    """Some requests, and then nothing: the loop leaves by itself or not at all."""

    def __init__(self) -> None:
        self._waiting = deque[Command](
            Submit(NewRequest(uid, np.array([5, 6, 7], np.int32), 50, ignore_eos=True))
            for uid in range(1, NUM_REQUESTS + 1)
        )

    def poll(self, timeout: float) -> bool:
        return bool(self._waiting)

    def recv(self) -> Command:
        return self._waiting.popleft()


def run_loop(folder: str, events: Connection) -> None:
    """What the child does: the context that it loses is its own."""
    checkpoint = open_checkpoint(
        folder, cache_dir=Path(folder) / "cache", progress=lambda message: None
    )
    options = CudaOptions(max_rows=8, token_budget=64, kv_pages=128)
    engine = PoisoningEngine(open_cuda_engine(checkpoint, options, lambda message: None))
    scheduler = Scheduler(SchedulerConfig(token_budget=64, max_running=8), engine.info, ())
    EngineLoop(scheduler, engine, Commands(), events.send, overlap=True).run()
    engine.close()
    events.close()


def test_a_lost_context_ends_the_steps_requests_and_then_the_engine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPES[0])
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_loop, args=(str(tmp_path), sender))
    child.start()
    sender.close()
    events: list[Event] = []
    try:
        while receiver.poll(90):
            events.append(receiver.recv())
    except EOFError:
        pass
    finally:
        child.join(10)
        child.kill()
    failed = [one for event in events if isinstance(event, StepOutput) for one in event.failed]
    assert {one.uid for one in failed} == set(range(1, NUM_REQUESTS + 1))
    assert {one.code for one in failed} == {Code.INTERNAL}
    assert isinstance(events[-1], Fatal)
    assert "CUDA" in events[-1].message
