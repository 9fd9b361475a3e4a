"""`tandem bench offline`: scheduler, engine loop and engine in this process, without gRPC.

What is no flag of its own is one of the worker's, such as --page-size, --no-overlap or
--kv-pages: `tandem worker --help` lists them.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from shared import bench_report
from shared.types import SamplingParams
from shared.workload import (
    STANDARD,
    STANDARD_CONTEXT,
    STANDARD_NUM_REQUESTS,
    STANDARD_TOKEN_BUDGET,
    WorkloadRequest,
    standard_workload,
)
from worker.config import EXIT_BAD_CONFIGURATION, WorkerConfig, load_config
from worker.engine.factory import open_engine
from worker.engine.null import NullEngine
from worker.engine_main import scheduler_config
from worker.messages import ModelInfo, NewRequest
from worker.models.config import ModelError
from worker.offline import OnTokens, Run, run_offline
from worker.scheduler.config import SchedulerConfig
from worker.step import Engine, EngineInfo

EXIT_FAILED = 1
# As shells report a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130

_NULL_VOCAB_SIZE = 151_936
# On a terminal; elsewhere nothing is drawn. Drawing takes the loop's interpreter lock.
_DRAWS_PER_S = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What the bench itself is told."""

    num_requests: int
    warms_up: bool
    timeout_s: float
    is_null: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """An open engine and how it is scheduled."""

    engine: Engine
    model: ModelInfo
    scheduling: SchedulerConfig
    overlap: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when every request finished, 1 when one did not, 2 on a wrong setting."""
    options, config = parse(sys.argv[1:] if arguments is None else arguments)
    bench_report.header("tandem bench offline")
    try:
        with _opened(options, config) as bench:
            run = _measure(bench, options)
    except ModelError as error:
        print(f"tandem bench offline: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except RuntimeError as error:
        print(f"tandem bench offline: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    _report(bench, options, run)
    if run.num_unfinished or run.num_failed:
        print(
            f"tandem bench offline: {run.num_failed} requests failed and {run.num_unfinished} "
            f"were unfinished after {run.seconds:.0f} s",
            file=sys.stderr,
        )
        return EXIT_FAILED
    return 0


def parse(arguments: Sequence[str]) -> tuple[Options, WorkerConfig]:
    """Both kinds of flags. Ends the process on --help and on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="tandem bench offline",
        description="Measure the engine process alone: scheduler, loop and engine, no gRPC.",
        epilog="Every flag of `tandem worker` may follow, such as --no-overlap, --model PATH, "
        "--kv-pages N or --no-cuda-graphs.",
        allow_abbrev=False,
    )
    parser.add_argument("--workload", choices=[STANDARD], default=STANDARD)
    parser.add_argument("--shape", help="qwen3-0.6b or qwen3-8b, with dummy weights")
    parser.add_argument(
        "--engine",
        choices=["cuda", "cpu", "echo", "null"],
        help="null computes nothing: what the host alone costs; default: cuda where it can",
    )
    parser.add_argument("--num-requests", type=_positive, default=STANDARD_NUM_REQUESTS)
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run other prompts of the same lengths first",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each pass")
    mine, rest = parser.parse_known_args(arguments)
    is_null = mine.engine == "null"
    # Before what the user says, which wins.
    defaults = ["--max-context", str(STANDARD_CONTEXT)]
    defaults += ["--token-budget", str(STANDARD_TOKEN_BUDGET)]
    defaults += ["--max-running", str(STANDARD_NUM_REQUESTS)]
    defaults += ["--max-waiting", str(max(mine.num_requests, 1024))]
    if mine.shape:
        defaults += ["--model", mine.shape, "--dummy-weights"]
    if mine.engine:
        defaults += ["--engine", "echo" if is_null else mine.engine]
    config = load_config([*_without(defaults, rest), *rest], os.environ)
    options = Options(mine.num_requests, mine.warm_up, mine.timeout, is_null)
    return options, config


def _without(defaults: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The defaults whose flags the user has not given: a flag may come only once."""
    given = {argument.partition("=")[0] for argument in rest}
    kept: list[str] = []
    for argument in defaults:
        if argument.startswith("--"):
            is_kept = argument not in given
        if is_kept:
            kept.append(argument)
    return kept


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


@contextmanager
def _opened(options: Options, config: WorkerConfig) -> Iterator[Bench]:
    """Raises ModelError."""
    console = Console(stderr=True, highlight=False)
    if options.is_null:
        engine, model = _open_null(config)
    else:
        opened = open_engine(
            config, os.environ, lambda message: console.print(message, style="dim", markup=False)
        )
        engine, model = opened.engine, opened.model
    try:
        scheduling = scheduler_config(config, engine.info.max_rows)
        yield Bench(engine, model, scheduling, config.overlap)
    finally:
        engine.close()


def _open_null(config: WorkerConfig) -> tuple[Engine, ModelInfo]:
    assert config.max_running is not None and config.max_context is not None
    info = EngineInfo(
        num_pages=config.kv_pages or config.max_running * (config.max_context // config.page_size),
        page_size=config.page_size,
        max_rows=config.max_running,
        max_context=config.max_context,
        vocab_size=_NULL_VOCAB_SIZE,
    )
    model = ModelInfo("null", "null", "none", "none", (), config.overlap)
    return NullEngine(info), model


def _measure(bench: Bench, options: Options) -> Run:
    """A pass with other prompts, if asked for, then the one that counts."""
    run = None
    for seed in (1, 0) if options.warms_up else (0,):
        requests = standard_workload(seed, options.num_requests)
        num_tokens = sum(request.max_tokens for request in requests)
        with _progress("warm-up" if seed else "measuring", num_tokens) as on_tokens:
            run = run_offline(
                bench.engine,
                [_new_request(i + 1, request) for i, request in enumerate(requests)],
                overlap=bench.overlap,
                config=bench.scheduling,
                eos_token_ids=bench.model.eos_token_ids,
                timeout_s=options.timeout_s,
                on_tokens=on_tokens,
            )
    assert run is not None
    return run


def _new_request(uid: int, request: WorkloadRequest) -> NewRequest:
    return NewRequest(
        uid,
        np.array(request.prompt_token_ids, np.int32),
        request.max_tokens,
        SamplingParams(temperature=request.temperature, seed=request.seed),
        ignore_eos=True,
    )


@contextmanager
def _progress(what: str, num_tokens: int) -> Iterator[OnTokens]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=_DRAWS_PER_S,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=num_tokens)
        yield lambda done: progress.update(task, completed=done)


def _report(bench: Bench, options: Options, run: Run) -> None:
    times = run.times
    steps = times.full_decode_steps()
    rows = max((times.num_rows[i] for i in steps), default=0)
    every = range(1, len(times.finished_at))
    tokens_per_s = run.num_tokens / run.seconds
    figures = {
        "tokens_per_s": tokens_per_s,
        "ttft_p50_ms": _percentile_ms(run.ttft_s, 50),
        "itl_p50_ms": _percentile_ms(run.itl_s, 50),
        "itl_p99_ms": _percentile_ms(run.itl_s, 99),
        "host_step_p50_ms": times.host_ms(steps),
        "device_idle_ratio": times.idle_ratio(steps) if steps else math.nan,
        "launch_p50_ms": times.launch_ms(steps),
        "step_p50_ms": times.interval_ms(steps),
        "whole_run_idle_ratio": times.idle_ratio(every) if every else math.nan,
    }
    full = f"full decode steps ({rows} rows)"
    bench_report.table(
        f"{bench.model.name}, {bench.model.device}, overlap {'on' if bench.overlap else 'off'}",
        {
            "requests": f"{options.num_requests:,}",
            "tokens": f"{run.num_tokens:,} in {run.seconds:,.2f} s",
            "throughput": bench_report.shown(tokens_per_s, "tokens/s", 0),
            "time to first token, p50": bench_report.shown(figures["ttft_p50_ms"], "ms"),
            "between tokens, p50": bench_report.shown(figures["itl_p50_ms"], "ms"),
            "between tokens, p99": bench_report.shown(figures["itl_p99_ms"], "ms"),
            f"{full}: step, p50": bench_report.shown(figures["step_p50_ms"], "ms"),
            "… host plan + commit, p50": bench_report.shown(figures["host_step_p50_ms"], "ms"),
            "… host launch, p50": bench_report.shown(figures["launch_p50_ms"], "ms"),
            "… device idle": bench_report.percent(figures["device_idle_ratio"]),
            "device idle, whole run": bench_report.percent(figures["whole_run_idle_ratio"]),
            "steps": f"{len(times.finished_at):,}",
            "preemptions": f"{run.load.preemptions:,}",
        },
    )
    bench_report.result(
        {name: bench_report.rounded(value, 4) for name, value in figures.items()}
        | {
            "seconds": round(run.seconds, 3),
            "requests": options.num_requests,
            "failed": run.num_failed + run.num_unfinished,
            "tokens": run.num_tokens,
            "model": bench.model.name,
            "overlap": bench.overlap,
        }
    )


def _percentile_ms(seconds: NDArray[np.float64], percent: float) -> float:
    return 1e3 * float(np.percentile(seconds, percent)) if len(seconds) else math.nan


if __name__ == "__main__":
    sys.exit(main())
