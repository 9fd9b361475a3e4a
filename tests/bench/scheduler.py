"""What the scheduler costs the host in each step: `python -m tests.bench.scheduler`.

256 running requests in the overlap loop's order with the null engine; one sample is the plan
of a step plus the commit of the one before. "Decode" is the ordinary step. In "churn" about
one request ends and one begins in every step, and the pages for it are evicted from a full
radix tree, of a thousand and of a hundred thousand nodes.
"""

import argparse
import statistics
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

    def __init__(self, num_pages: int) -> None:
        info = EngineInfo(num_pages, _PAGE_SIZE, _RUNNING, _MAX_CONTEXT, _VOCAB_SIZE)
        config = SchedulerConfig(token_budget=16_384, max_running=_RUNNING, max_waiting=1 << 20)
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
            for _ in range(min(_RUNNING, nodes - self.num_nodes)):
                self.submit(_FILLER_PAGES * _PAGE_SIZE, 1)
            while not self.scheduler.is_idle:
                self.turn()

    def decode(self, steps: int) -> Samples:
        """Ordinary steps: all requests decode, none begins or ends."""
        if not self.scheduler.load().running:
            for _ in range(_RUNNING):
                self.submit(int(self._rng.integers(_PROMPT_LEN, 2 * _PROMPT_LEN)), 3800)
            self._warm_up()
        return self._measure(steps)

    def churn(self, steps: int) -> Samples:
        """Steps in which requests end, and others take their places and cached pages."""
        if not self.scheduler.load().running:
            for tokens in range(1, _RUNNING + 1):
                self.submit(_PROMPT_LEN, tokens)
            self._warm_up()
        return self._measure(steps)

    def _measure(self, steps: int) -> Samples:
        before = self.num_nodes
        samples = []
        for _ in range(steps):
            while self.num_live < _RUNNING:
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
    options = parser.parse_args()
    report.header(f"Host time of a step: {_RUNNING} running requests, overlap, null engine")
    plain = Bench(num_pages=_RUNNING * (_MAX_CONTEXT // _PAGE_SIZE))
    small, large = _bench_with_tree(1_000), _bench_with_tree(100_000)
    print(f"{'steps':<12}{'tree nodes':>16}{'p50 ms':>9}{'p90 ms':>9}{'p99 ms':>9}")
    p50s: dict[str, list[float]] = {"decode": [], "1e3": [], "1e5": []}
    for _ in range(options.rounds):
        p50s["decode"].append(_show("decode", plain.decode(options.steps)))
        p50s["1e3"].append(_show("churn, 1e3", small.churn(options.steps)))
        p50s["1e5"].append(_show("churn, 1e5", large.churn(options.steps)))
    report.result(
        {
            "plan_commit_p50_ms": round(statistics.median(p50s["decode"]), 4),
            "p50_ms_at_1e3_nodes": round(statistics.median(p50s["1e3"]), 4),
            "p50_ms_at_1e5_nodes": round(statistics.median(p50s["1e5"]), 4),
        }
    )


def _bench_with_tree(nodes: int) -> Bench:
    bench = Bench(num_pages=nodes * _FILLER_PAGES + _RUNNING * _CHURN_PAGES)
    bench.fill_tree(nodes)
    return bench


def _show(name: str, samples: Samples) -> float:
    row = [samples.p50_ms, samples.percentile(90), samples.percentile(99)]
    size = f"{samples.nodes_before}-{samples.nodes_after}"
    print(f"{name:<12}{size:>16}" + "".join(f"{value:>9.3f}" for value in row), flush=True)
    return samples.p50_ms


if __name__ == "__main__":
    main()
