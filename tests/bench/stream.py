"""What streaming costs a gateway: `python -m tests.bench.stream`.

An echo engine gives each of 256 streams a token a step, at the pace of a real one (150 and
300 steps a second) or as fast as it can; h2load or ghz reads the streams. Measured is the
CPU time of the gateway's processes, all threads of them, for each token, over a window in
which every stream runs; and how late steps arrive there, by the gateway's own metric.

- us_per_token: 150 steps/s, every token a message of its own.
- us_per_token_coalesced: 300 steps/s, deltas merged as the gateway sees fit.
- tokens_per_core_s, lag_p99_ms: the most tokens a second that one process on one core
  carried at a p99 lag of at most 15 ms, and that lag. Where no round kept the bound, the
  round that came closest.
  A round whose p99 lag exceeds 100 ms is taken as a whole, its start included.
- two_process_speedup: tokens/s of two processes over those of one, engine at full speed,
  a token a message. Null where there is no core for each, one for the worker, one for the
  load.

Rounds alternate between the kinds; figures are medians. Only a quiet machine gives figures
to compare with others.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.bench import report
from tests.bench.stream_load import Generator, Load, LoadError
from tests.bench.stream_pair import (
    MAX_CONTEXT,
    BenchPair,
    PairOptions,
    Sample,
    bench_pair,
    lag_quantile_ms,
    num_cores,
)

MAX_LAG_MS = 15.0
# Beyond it a gateway no longer keeps up.
MAX_KEPT_LAG_MS = 100.0

_LICENSE = Path(__file__).parents[2] / "LICENSE"
_FULL_SPEED = 0.0
# Of one stream at full speed: 256 of them stay below what a link keeps for a slow gateway.
_SHORT_STREAM = 900
_REQUESTS_PER_STREAM = 4
_START_LIMIT_S = 30.0
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """The shape of the bench."""

    streams: int
    connections: int
    rates: Sequence[float]
    rounds: int
    window_s: float
    load: str
    is_pinned: bool
    without_batch: bool
    skips_speedup: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table. A rate of 0 is full speed."""

    rate: float
    coalesce: bool
    processes: int = 1

    def __str__(self) -> str:
        pace = f"{self.rate:g}/s" if self.rate else "full speed"
        merging = "coalesced" if self.coalesce else "one by one"
        return f"{pace}, {merging}, {self.processes} process{'es' * (self.processes > 1)}"


@dataclass(frozen=True, slots=True)
class Round:
    """What one run showed."""

    tokens_per_s: float
    us_per_token: float
    tokens_per_message: float
    cores: float
    lag_p50_ms: float
    lag_p99_ms: float


async def bench(options: Options) -> dict[str, float | None]:
    """Runs every kind in turns. Returns the figures of the last line."""
    kinds = _kinds(options)
    rounds: dict[Kind, list[Round]] = {kind: [] for kind in kinds}
    columns = ("tokens/s", "us/token", "per msg", "cores", "lag p50", "p99 ms")
    print(f"{'kind':<40}" + "".join(f"{name:>10}" for name in columns))
    for _ in range(options.rounds):
        for kind in kinds:
            rounds[kind].append(await _run(kind, options))
            _show(kind, rounds[kind][-1])
    medians = {kind: _median(runs) for kind, runs in rounds.items()}
    print()
    for kind, median in medians.items():
        _show(kind, median)
    return _figures(medians)


def _kinds(options: Options) -> list[Kind]:
    kinds = [Kind(rate, coalesce) for rate in options.rates for coalesce in (False, True)]
    # A core for each process, one for the worker, one for the load.
    if num_cores() >= 4 and not options.skips_speedup:
        kinds += [Kind(_FULL_SPEED, False, processes) for processes in (1, 2)]
    return kinds


async def _run(kind: Kind, options: Options) -> Round:
    # Each round pins itself anew, on all cores that this process began with.
    before = os.sched_getaffinity(0)
    pair_options = PairOptions(
        step_ms=1e3 / kind.rate if kind.rate else 0.0,
        streams=options.streams,
        processes=kind.processes,
        coalesce=kind.coalesce,
        is_pinned=options.is_pinned,
        without_batch=options.without_batch,
    )
    try:
        async with bench_pair(pair_options) as pair:
            with tempfile.TemporaryDirectory() as folder:
                if kind.rate:
                    return await _paced(pair, kind, options, Path(folder))
                return await _full_speed(pair, options, Path(folder))
    finally:
        os.sched_setaffinity(0, before)


async def _paced(pair: BenchPair, kind: Kind, options: Options, folder: Path) -> Round:
    """A window in which all streams run; they outlast it and are cut off."""
    # Streams begin some seconds before the window, in turns, and end after it.
    length = min(MAX_CONTEXT // 2, round(kind.rate * (2 * options.window_s + _START_LIMIT_S / 3)))
    generator = Generator(options.load, await _request(pair, length), folder)
    load = Load(options.streams, options.connections, options.streams)
    first = await pair.sample()
    with generator.running(pair.address, load) as running:
        async with asyncio.timeout(_START_LIMIT_S):
            while (await pair.sample()).num_running < options.streams:
                running.require_alive()
                await asyncio.sleep(0.1)
        await asyncio.sleep(_SETTLE_S)
        begin = await pair.sample()
        await asyncio.sleep(options.window_s)
        end = await pair.sample()
        running.require_alive()
    if not begin.num_running == end.num_running == options.streams:
        raise LoadError(f"only {end.num_running} of {options.streams} streams ran all along")
    last = await _drained(pair)
    run = _round(begin, end, end.num_generated - begin.num_generated, (first, last))
    if run.lag_p99_ms < MAX_KEPT_LAG_MS:
        return run
    # The gateway fell behind: what was sampled in the window is not what it sent in it.
    whole = _round(first, last, last.num_delivered - first.num_delivered, (first, last))
    return replace(whole, lag_p50_ms=run.lag_p50_ms, lag_p99_ms=run.lag_p99_ms)


async def _drained(pair: BenchPair) -> Sample:
    """Once every stream has ended: a gateway counts its tokens and messages then."""
    async with asyncio.timeout(_START_LIMIT_S):
        while True:
            await asyncio.sleep(0.2)
            sample = await pair.sample()
            if not sample.num_running and not sample.metrics["tandem_requests_live"]:
                return sample


async def _full_speed(pair: BenchPair, options: Options, folder: Path) -> Round:
    """A number of streams from the first to the last, as fast as they go."""
    generator = Generator(options.load, await _request(pair, _SHORT_STREAM), folder)
    total = _REQUESTS_PER_STREAM * options.streams
    begin = await pair.sample()
    with generator.running(
        pair.address, Load(options.streams, options.connections, total)
    ) as running:
        await asyncio.to_thread(running.wait_end, 10 * _START_LIMIT_S)
        end = await pair.sample()
    num_tokens = end.num_delivered - begin.num_delivered
    if num_tokens < total * _SHORT_STREAM:
        raise LoadError(f"{num_tokens:,.0f} tokens of {total * _SHORT_STREAM:,} were delivered")
    return _round(begin, end, num_tokens, (begin, end))


def _round(begin: Sample, end: Sample, num_tokens: float, whole: tuple[Sample, Sample]) -> Round:
    seconds, cpu_s = end.at - begin.at, end.cpu_s - begin.cpu_s
    num_messages = whole[1].num_messages - whole[0].num_messages
    num_delivered = whole[1].num_delivered - whole[0].num_delivered
    return Round(
        tokens_per_s=num_tokens / seconds,
        us_per_token=1e6 * cpu_s / num_tokens,
        tokens_per_message=num_delivered / max(num_messages, 1.0),
        cores=cpu_s / seconds,
        lag_p50_ms=lag_quantile_ms(begin, end, 0.5),
        lag_p99_ms=lag_quantile_ms(begin, end, 0.99),
    )


async def _request(pair: BenchPair, length: int) -> bytes:
    """One whose echo is text of this many tokens."""
    token_ids = await pair.prompt_ids(_LICENSE.read_text())
    prompt = (token_ids * (1 + length // len(token_ids)))[:length]
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        max_tokens=length,
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StopConditions(ignore_eos=True),
    ).SerializeToString()


def _median(runs: Sequence[Round]) -> Round:
    return Round(
        *(
            statistics.median(getattr(run, name) for run in runs)
            for name in Round.__dataclass_fields__
        )
    )


def _show(kind: Kind, run: Round) -> None:
    print(
        f"{kind!s:<40}{run.tokens_per_s:>10,.0f}{run.us_per_token:>10.1f}"
        f"{run.tokens_per_message:>10.2f}{run.cores:>10.2f}"
        f"{run.lag_p50_ms:>10.1f}{run.lag_p99_ms:>10.1f}",
        flush=True,
    )


def _figures(medians: dict[Kind, Round]) -> dict[str, float | None]:
    paced = {kind: run for kind, run in medians.items() if kind.rate}
    plain = [run for kind, run in paced.items() if not kind.coalesce]
    merged = [run for kind, run in paced.items() if kind.coalesce]
    within = [run for run in paced.values() if run.lag_p99_ms <= MAX_LAG_MS]
    best = (
        max(within, key=lambda run: run.tokens_per_s)
        if within
        else min(paced.values(), key=lambda run: run.lag_p99_ms)
    )
    one, two = (medians.get(Kind(_FULL_SPEED, False, processes)) for processes in (1, 2))
    speedup = two.tokens_per_s / one.tokens_per_s if one and two else None
    return {
        "us_per_token": round(plain[0].us_per_token, 2),
        "us_per_token_coalesced": round(merged[-1].us_per_token, 2),
        "tokens_per_core_s": round(best.tokens_per_s),
        "lag_p99_ms": round(best.lag_p99_ms, 2),
        "two_process_speedup": round(speedup, 3) if speedup else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--rates", default="150,300", help="steps a second, ascending")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--load", choices=("auto", "h2load", "ghz"), default="auto")
    parser.add_argument(
        "--pin",
        dest="is_pinned",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a core for each gateway process, the others for the rest",
    )
    parser.add_argument(
        "--without-batch", action="store_true", help="the gateway's threads in SCHED_OTHER"
    )
    parser.add_argument("--skips-speedup", action="store_true", help="no full speed")
    options = Options(**vars(parser.parse_args()))
    options = replace(options, rates=sorted(map(float, str(options.rates).split(","))))
    report.header(f"Streaming: {options.streams} streams over {options.connections} connections")
    try:
        figures = asyncio.run(bench(options))
    except LoadError as error:
        sys.exit(f"error: {error}")
    report.result(figures)


if __name__ == "__main__":
    main()
