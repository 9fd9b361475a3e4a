"""Runs requests through the engine loop in this process, without front or pipe, and times it.

For benchmarks: the scheduler and the loop are those that serve.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worker.engine_loop import EngineLoop
from worker.messages import (
    Command,
    Event,
    Fatal,
    Load,
    NewRequest,
    StepOutput,
    Stop,
    Submit,
)
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import Engine, EngineInfo, StepHandle, StepPlan, StepResult
from worker.structured.outputs import StructuredOutputs

# Of the fullest decode step's rows: what counts as a full batch.
FULL_BATCH = 7 / 8

# Told the number of tokens so far, after every step.
OnTokens = Callable[[int], None]


@dataclass(slots=True)
class StepTimes:
    """Of each step in order: rows, tokens read from the KV, seconds of host and device."""

    num_rows: list[int] = field(default_factory=list)
    is_decode: list[bool] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    launch_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    started_at: list[float] = field(default_factory=list)
    finished_at: list[float] = field(default_factory=list)

    def decode_steps(self, least_rows: int, most_rows: int) -> list[int]:
        """Steps of decode rows alone that follow another such step."""
        return [
            i
            for i in range(1, len(self.finished_at))
            if least_rows <= self.num_rows[i] <= most_rows
            and self.is_decode[i]
            and self.is_decode[i - 1]
        ]

    def full_decode_steps(self) -> list[int]:
        """The same at a full batch, whatever the largest one was."""
        pairs = zip(self.num_rows, self.is_decode, strict=True)
        most = max((num_rows for num_rows, is_decode in pairs if is_decode), default=0)
        return self.decode_steps(math.ceil(FULL_BATCH * most), most)

    def host_ms(self, steps: Sequence[int]) -> float:
        """Median of plan plus commit."""
        return 1e3 * _median([self.plan_s[i] + self.commit_s[i] for i in steps])

    def launch_ms(self, steps: Sequence[int]) -> float:
        return 1e3 * _median([self.launch_s[i] for i in steps])

    def interval_ms(self, steps: Sequence[int]) -> float:
        """Median time from the end of a step to the end of the next."""
        return 1e3 * _median([self.finished_at[i] - self.finished_at[i - 1] for i in steps])

    def idle_ratio(self, steps: Sequence[int]) -> float:
        """Share of the time between ends in which the device had nothing to do."""
        idle = sum(max(0.0, self.started_at[i] - self.finished_at[i - 1]) for i in steps)
        whole = sum(self.finished_at[i] - self.finished_at[i - 1] for i in steps)
        return idle / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    seconds: float
    token_ids: dict[int, list[int]]
    num_failed: int
    # Neither finished nor failed: the time was up.
    num_unfinished: int
    load: Load
    times: StepTimes
    # [num_requests] seconds from the start to each request's first token.
    ttft_s: NDArray[np.float64]
    # Seconds between tokens that follow each other in a request, all requests together.
    itl_s: NDArray[np.float64]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))


class TimedScheduler(Scheduler):
    """A scheduler that notes how long it takes."""

    times: StepTimes

    def plan(self, now: float) -> StepPlan | None:
        begin = time.perf_counter()
        plan = super().plan(now)
        if plan is not None:
            self.times.plan_s.append(time.perf_counter() - begin)
            self.times.num_rows.append(plan.num_rows)
            self.times.is_decode.append(plan.num_rows == plan.num_decode)
            self.times.num_cached.append(int(plan.cached_lens.sum()))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        begin = time.perf_counter()
        super().commit(plan, result, now)
        self.times.commit_s.append(time.perf_counter() - begin)
        self.times.started_at.append(result.started_at)
        self.times.finished_at.append(result.finished_at)


class TimedEngine:
    """An engine whose launches are timed."""

    def __init__(self, engine: Engine, times: StepTimes) -> None:
        self._engine = engine
        self._times = times

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def launch(self, plan: StepPlan) -> StepHandle:
        begin = time.perf_counter()
        handle = self._engine.launch(plan)
        self._times.launch_s.append(time.perf_counter() - begin)
        return handle

    def close(self) -> None:
        self._engine.close()


class _Commands:
    """All requests at once, and Stop when the last has ended or the time is up."""

    def __init__(self, requests: Sequence[NewRequest], deadline: float) -> None:
        self._waiting: list[Command] = [Submit(request) for request in reversed(requests)]
        self._deadline = deadline
        self.num_open = len(requests)

    def poll(self, timeout: float) -> bool:
        return bool(self._waiting) or self.num_open == 0 or time.monotonic() > self._deadline

    def recv(self) -> Command:
        return self._waiting.pop() if self._waiting else Stop()


def run_offline(
    engine: Engine,
    requests: Sequence[NewRequest],
    *,
    overlap: bool = True,
    config: SchedulerConfig | None = None,
    eos_token_ids: tuple[int, ...] = (),
    timeout_s: float = math.inf,
    on_tokens: OnTokens | None = None,
    structures: StructuredOutputs | None = None,
) -> Run:
    """Runs the requests to their ends. The engine stays open; nothing stays cached.

    Raises RuntimeError when the loop cannot go on.
    """
    scheduler = TimedScheduler(
        config or SchedulerConfig(token_budget=16_384, max_running=engine.info.max_rows),
        engine.info,
        eos_token_ids,
    )
    scheduler.times = times = StepTimes()
    begin = time.monotonic()
    commands = _Commands(requests, begin + timeout_s)
    outputs: list[StepOutput] = []
    num_tokens = 0

    def emit(event: Event) -> None:
        nonlocal num_tokens
        if isinstance(event, Fatal):
            raise RuntimeError(event.message)
        if isinstance(event, StepOutput):
            outputs.append(event)
            commands.num_open -= len(event.finished) + len(event.failed)
            num_tokens += len(event.token_ids)
            if on_tokens is not None:
                on_tokens(num_tokens)

    timed = TimedEngine(engine, times)
    loop = EngineLoop(scheduler, timed, commands, emit, overlap=overlap, structures=structures)
    loop.run()
    seconds = time.monotonic() - begin
    ttft_s, itl_s = _latencies(outputs, begin)
    return Run(
        seconds=seconds,
        token_ids=_token_ids(requests, outputs),
        num_failed=sum(len(output.failed) for output in outputs),
        num_unfinished=commands.num_open,
        load=scheduler.load(),
        times=times,
        ttft_s=ttft_s,
        itl_s=itl_s,
    )


def _token_ids(
    requests: Sequence[NewRequest], outputs: Sequence[StepOutput]
) -> dict[int, list[int]]:
    token_ids: dict[int, list[int]] = {request.uid: [] for request in requests}
    for output in outputs:
        for uid, token_id in zip(output.uids.tolist(), output.token_ids.tolist(), strict=True):
            token_ids[uid].append(token_id)
    return token_ids


def _latencies(
    outputs: Sequence[StepOutput], begin: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times to first tokens and between tokens, by when the loop told of them."""
    if not outputs:
        return np.empty(0), np.empty(0)
    uids = np.concatenate([output.uids for output in outputs])
    times = np.repeat(
        [output.committed_at - begin for output in outputs],
        [len(output.uids) for output in outputs],
    )
    # Stable, so that the tokens of each request stay in the order of time.
    order = np.argsort(uids, kind="stable")
    uids, times = uids[order], times[order]
    is_first = np.ones(len(uids), np.bool_)
    is_first[1:] = uids[1:] != uids[:-1]
    return times[is_first], np.diff(times)[~is_first[1:]]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")
