"""Speed of the CUDA engine alone: `python -m tests.bench.engine`.

The standard workload is 256 requests at once, prompt and output lengths uniform in
100 … 1024 tokens, temperature 0.6, eos ignored, in the shape of Qwen3-0.6B with random
weights. A first pass with other prompts warms up; the second is reported. The batches are
greedy, prompts of 256 tokens, decode steps alone.
"""

import argparse
import sys
import time

import numpy as np
import torch

from shared import workload
from shared.types import SamplingParams
from tests.bench import report
from tests.bench.offline import Run, random_prompt, run_offline
from worker.checkpoint.dummy import open_dummy
from worker.engine.cuda.open import CudaOptions, open_cuda_engine
from worker.messages import NewRequest
from worker.step import Engine

_VOCAB_USED = 10_000


def standard_workload(seed: int) -> list[NewRequest]:
    """The 256 requests of the public benchmark (seed 0), or others of the same lengths."""
    return [
        NewRequest(
            i + 1,
            np.array(request.prompt_token_ids, np.int32),
            request.max_tokens,
            SamplingParams(temperature=request.temperature, seed=request.seed),
            ignore_eos=True,
        )
        for i, request in enumerate(workload.standard_workload(seed))
    ]


def batch_workload(batch: int, prompt_len: int, max_tokens: int, seed: int) -> list[NewRequest]:
    rng = np.random.default_rng(seed)
    return [
        NewRequest(
            i + 1,
            random_prompt(rng, prompt_len, _VOCAB_USED),
            max_tokens,
            SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        for i in range(batch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,8,32", help="empty: none")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--serial", action="store_true", help="measure the serial loop too")
    parser.add_argument("--max-context", type=int, default=4096)
    arguments = parser.parse_args()
    report.header("CUDA engine")
    begin = time.perf_counter()
    engine = open_cuda_engine(
        open_dummy(arguments.shape),
        CudaOptions(max_context=arguments.max_context, graphs=not arguments.no_graphs),
        lambda message: print(f"{time.perf_counter() - begin:7.1f} s  {message}", file=sys.stderr),
    )
    print(f"engine open after {time.perf_counter() - begin:.1f} s: {engine.info}", flush=True)
    figures: dict[str, object] = {"shape": arguments.shape}
    for batch in map(int, filter(None, arguments.batches.split(","))):
        figures |= _measure_batch(engine, batch)
    figures |= _measure_standard(engine, overlap=True)
    if arguments.serial:
        figures |= _measure_standard(engine, overlap=False)
    figures["peak_memory_mib"] = torch.cuda.max_memory_reserved() >> 20
    engine.close()
    report.result(figures)


def _measure_batch(engine: Engine, batch: int) -> dict[str, object]:
    run_offline(engine, batch_workload(batch, 256, 32, seed=1))
    run = run_offline(engine, batch_workload(batch, 256, 256, seed=2))
    steps = run.times.decode_steps(batch, batch)
    ms = run.times.interval_ms(steps)
    idle = run.times.idle_ratio(steps)
    print(
        f"batch {batch}: {ms:.3f} ms a token, device idle {idle:.2%}, host "
        f"{run.times.host_ms(steps):.2f} + launch {run.times.launch_ms(steps):.2f} ms",
        flush=True,
    )
    return {f"batch{batch}_ms_per_token": round(ms, 3), f"batch{batch}_idle": round(idle, 4)}


def _measure_standard(engine: Engine, *, overlap: bool) -> dict[str, object]:
    name = "" if overlap else "serial_"
    run_offline(engine, standard_workload(1), overlap=overlap)
    run = run_offline(engine, standard_workload(0), overlap=overlap)
    assert run.num_failed == 0
    print(f"standard workload, overlap {'on' if overlap else 'off'}: {_summary(run)}", flush=True)
    for low, high in ((1, 15), (16, 63), (64, 127), (128, 191), (192, 256)):
        _describe_range(run, low, high)
    steps = run.times.decode_steps(225, 256)
    return {
        f"{name}tokens_per_s": round(run.num_tokens / run.seconds),
        f"{name}seconds": round(run.seconds, 3),
        f"{name}device_idle_ratio": round(run.times.idle_ratio(steps), 4),
        f"{name}host_step_p50_ms": round(run.times.host_ms(steps), 3),
        f"{name}launch_p50_ms": round(run.times.launch_ms(steps), 3),
        f"{name}step_p50_ms": round(run.times.interval_ms(steps), 3),
    }


def _describe_range(run: Run, low: int, high: int) -> None:
    """Where the time goes: a line fitted through time against tokens read."""
    times = run.times
    steps = times.decode_steps(low, high)
    if len(steps) < 3:
        return
    seconds = [times.finished_at[i] - times.finished_at[i - 1] for i in steps]
    slope, offset = np.polyfit([times.num_cached[i] for i in steps], seconds, 1)
    print(
        f"  {low:3}-{high} rows: {len(steps)} steps, {sum(seconds):.3f} s, "
        f"{1e3 * offset:.2f} ms + {1e9 * slope:.2f} ns a token in the KV"
    )


def _summary(run: Run) -> str:
    times = run.times
    decode = times.decode_steps(1, 1 << 20)
    prefill = [i for i in range(1, len(times.finished_at)) if not times.is_decode[i]]
    prefill_s = sum(times.finished_at[i] - times.finished_at[i - 1] for i in prefill)
    prefill_s += times.finished_at[0] - times.started_at[0]
    return (
        f"{run.num_tokens} tokens in {run.seconds:.3f} s = {run.num_tokens / run.seconds:.0f} "
        f"tokens/s; {len(times.finished_at)} steps, {len(prefill) + 1} with prefill "
        f"({prefill_s:.3f} s), idle {times.idle_ratio(decode):.2%} of decode, "
        f"{run.load.preemptions} preemptions"
    )


if __name__ == "__main__":
    main()
