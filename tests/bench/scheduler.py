"""What the scheduler costs the host in each step: `python -m tests.bench.scheduler`.

Running requests in the overlap loop's order with the null engine; one sample is the plan of
a step plus the commit of the one before. "Decode" is the ordinary step, of 1 to 256 rows. In
"churn" about one of 256 requests ends and one begins in every step, and the pages for it are
evicted from a full radix tree, of a thousand and of a hundred thousand nodes.

`--against DIR` runs this file with the scheduler of another checkout in turns with this one's,
and shows this one's figures as ratios to the other's: machines change their pace from minute to
minute by more than is worth knowing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

from shared.types import SamplingParams
from tests.bench import report
from worker.engine.null import NullEngine
from worker.messages import NewRequest
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.step import EngineInfo, StepHandle, StepPlan

_RUNNING = 256
_ROWS = (1, 8, 32, _RUNNING)
_PAGE_SIZE = 16
_MAX_CONTEXT = 4096
_VOCAB_SIZE = 151_936
_PROMPT_LEN = 100
_CHURN_TOKENS = 256
# An ended request of the churn leaves two nodes of this many pages in all; the tree is first
# filled with nodes of half of it, so that their number stays about the same.
_CHURN_PAGES = -(-(_PROMPT_LEN + _CHURN_TOKENS) // _PAGE_SIZE)
_FILLER_PAGES = _CHURN_PAGES // 2


@dataclass(frozen=True, slots=True)
class Samples:
    """Milliseconds of each measured step, and the tree's size while it was measured."""

    steps_ms: list[float]
    nodes_before: int
    nodes_after: int

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.steps_ms, n=100)[percent - 1]

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.steps_ms)


class Bench:
    """A scheduler under the overlap loop, without the pipe."""

    def __init__(self, num_pages: int, rows: int = _RUNNING) -> None:
        info = EngineInfo(num_pages, _PAGE_SIZE, rows, _MAX_CONTEXT, _VOCAB_SIZE)
        config = SchedulerConfig(token_budget=16_384, max_running=rows, max_waiting=1 << 20)
        self._rows = rows
        self.scheduler = Scheduler(config, info, eos_token_ids=(1,))
        self._engine = NullEngine(info)
        self._rng = np.random.default_rng(0)
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        self._num_submitted = 0

    @property
    def num_nodes(self) -> int:
        return self.scheduler.num_cache_nodes

    def submit(self, prompt_len: int, max_tokens: int) -> None:
        self._num_submitted += 1
        prompt = self._rng.integers(2, _VOCAB_SIZE, prompt_len).astype(np.int32)
        params = SamplingParams(temperature=0.6, seed=self._num_submitted)
        request = NewRequest(self._num_submitted, prompt, max_tokens, params, ignore_eos=True)
        self.scheduler.add(request, time.monotonic())

    def turn(self) -> float:
        """One turn of the loop; returns the seconds of plan and commit."""
        begin = time.perf_counter()
        plan = self.scheduler.plan(time.monotonic())
        planned = time.perf_counter()
        launched = None if plan is None else (plan, self._engine.launch(plan))
        previous, self._in_flight = self._in_flight, launched
        committing = time.perf_counter()
        if previous is not None:
            self.scheduler.commit(previous[0], previous[1].result(), time.monotonic())
        committed = time.perf_counter()
        self.scheduler.drain_output(time.monotonic())
        return (planned - begin) + (committed - committing)

    def fill_tree(self, nodes: int) -> None:
        """Runs short requests of unlike prompts until the tree has this many nodes."""
        while self.num_nodes < nodes:
            for _ in range(min(self._rows, nodes - self.num_nodes)):
                self.submit(_FILLER_PAGES * _PAGE_SIZE, 1)
            while not self.scheduler.is_idle:
                self.turn()

    def decode(self, steps: int) -> Samples:
        """Ordinary steps: all requests decode, none begins or ends."""
        if not self.scheduler.load().running:
            for _ in range(self._rows):
                self.submit(int(self._rng.integers(_PROMPT_LEN, 2 * _PROMPT_LEN)), 3800)
            self._warm_up()
        return self._measure(steps)

    def churn(self, steps: int) -> Samples:
        """Steps in which requests end, and others take their places and cached pages."""
        if not self.scheduler.load().running:
            for tokens in range(1, self._rows + 1):
                self.submit(_PROMPT_LEN, tokens)
            self._warm_up()
        return self._measure(steps)

    def _measure(self, steps: int) -> Samples:
        before = self.num_nodes
        samples = []
        for _ in range(steps):
            while self.num_live < self._rows:
                self.submit(_PROMPT_LEN, _CHURN_TOKENS)
            samples.append(1e3 * self.turn())
        return Samples(samples, before, self.num_nodes)

    @property
    def num_live(self) -> int:
        load = self.scheduler.load()
        return load.running + load.waiting

    def _warm_up(self) -> None:
        for _ in range(20):
            self.turn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="measured steps of each round")
    parser.add_argument("--rounds", type=int, default=3, help="at most 3; the kinds alternate")
    parser.add_argument("--against", metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each, in turns")
    options = parser.parse_args()
    report.header("Host time of a step: overlap, null engine")
    if options.against is None:
        report.result(_measure_all(options.steps, options.rounds))
    else:
        report.result(_compare(options.against, options.pairs, options.steps))


def _measure_all(steps: int, rounds: int) -> dict[str, float]:
    decoding = {rows: Bench(rows * (_MAX_CONTEXT // _PAGE_SIZE), rows) for rows in _ROWS}
    churning = {f"1e{n}": _bench_with_tree(10**n) for n in (3, 5)}
    print(f"{'steps':<12}{'tree nodes':>16}{'p50 ms':>9}{'p90 ms':>9}{'p99 ms':>9}")
    p50s: dict[str, list[float]] = {}
    for _ in range(rounds):
        for rows, bench in decoding.items():
            key = "plan_commit_p50_ms" if rows == _RUNNING else f"p50_ms_at_{rows}_rows"
            p50s.setdefault(key, []).append(_show(f"decode, {rows}", bench.decode(steps)))
        for nodes, bench in churning.items():
            samples = bench.churn(steps)
            p50s.setdefault(f"p50_ms_at_{nodes}_nodes", []).append(
                _show(f"churn, {nodes}", samples)
            )
    return {key: round(statistics.median(values), 4) for key, values in p50s.items()}


def _compare(other: str, pairs: int, steps: int) -> dict[str, float]:
    """Of each figure its ratio to the other checkout's: the median of pairs of runs in turns."""
    ratios: dict[str, list[float]] = {}
    for i in range(pairs):
        # Each goes first as often as the other.
        order = (other, ".") if i % 2 else (".", other)
        figures = {directory: _run_in(directory, steps) for directory in order}
        for key, value in figures["."].items():
            ratios.setdefault(key, []).append(value / figures[other][key])
    return {key: round(statistics.median(values), 3) for key, values in ratios.items()}


def _run_in(directory: str, steps: int) -> dict[str, float]:
    """One round of this very file with the scheduler of a checkout."""
    command = [sys.executable, __file__, "--steps", str(steps), "--rounds", "1"]
    environment = os.environ | {"PYTHONPATH": os.path.abspath(directory)}
    done = subprocess.run(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _bench_with_tree(nodes: int) -> Bench:
    bench = Bench(nodes * _FILLER_PAGES + _RUNNING * _CHURN_PAGES)
    bench.fill_tree(nodes)
    return bench


def _show(name: str, samples: Samples) -> float:
    row = [samples.p50_ms, samples.percentile(90), samples.percentile(99)]
    size = f"{samples.nodes_before}-{samples.nodes_after}"
    print(f"{name:<12}{size:>16}" + "".join(f"{value:>9.3f}" for value in row), flush=True)
    return samples.p50_ms


if __name__ == "__main__":
    main()
