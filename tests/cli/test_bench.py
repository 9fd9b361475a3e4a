"""`tandem bench offline` and `tandem bench serve`, small, on engines that need no weights."""

import math

import numpy as np
import pytest

from shared.types import SamplingParams
from shared.workload import standard_workload
from tests.cli.bench_figures import KEYS, last_line
from tests.cli.terminal import tandem
from worker.engine.null import NullEngine
from worker.messages import NewRequest
from worker.offline import run_offline
from worker.step import EngineInfo


def test_the_standard_workload_is_256_requests_that_fit_its_context() -> None:
    requests = standard_workload()
    assert len(requests) == 256
    prompts = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert min(prompts) >= 100 and max(prompts) <= 1024
    assert min(outputs) >= 100 and max(outputs) <= 1024
    # What seed 0 has drawn ever since the figures that it is compared with.
    assert (sum(prompts), sum(outputs)) == (142_827, 133_966)


def test_fewer_requests_are_the_first_of_all() -> None:
    assert standard_workload(num_requests=5) == standard_workload()[:5]


def test_another_seed_has_other_prompts_of_the_same_lengths() -> None:
    first, second = standard_workload(0, 3), standard_workload(1, 3)
    for one, other in zip(first, second, strict=True):
        assert len(one.prompt_token_ids) == len(other.prompt_token_ids)
        assert one.max_tokens == other.max_tokens
        assert one.prompt_token_ids != other.prompt_token_ids


def some_requests(lengths: list[int]) -> list[NewRequest]:
    prompt = np.arange(10, dtype=np.int32)
    return [
        NewRequest(i + 1, prompt, length, SamplingParams(), ignore_eos=True)
        for i, length in enumerate(lengths)
    ]


def test_an_offline_run_counts_every_token_and_every_gap() -> None:
    engine = NullEngine(EngineInfo(100, 16, 4, 256, 1000), token_id=7)
    run = run_offline(engine, some_requests([5, 1, 9]))
    assert {uid: len(tokens) for uid, tokens in run.token_ids.items()} == {1: 5, 2: 1, 3: 9}
    assert len(run.ttft_s) == 3
    assert len(run.itl_s) == 4 + 0 + 8
    assert (run.ttft_s > 0).all() and (run.itl_s >= 0).all()
    assert run.num_failed == run.num_unfinished == 0


def test_an_offline_run_ends_when_its_time_is_up() -> None:
    engine = NullEngine(EngineInfo(100, 16, 4, 256, 1000))
    run = run_offline(engine, some_requests([200] * 8), timeout_s=0.0)
    assert run.num_unfinished > 0
    assert run.seconds < 10


@pytest.mark.parametrize(("flag", "overlap"), [("--overlap", True), ("--no-overlap", False)])
async def test_bench_offline_ends_in_one_line_of_figures(flag: str, overlap: bool) -> None:
    run = await tandem("bench", "offline", "--engine", "null", "--num-requests", "16", flag)
    assert run.code == 0, run.err
    figures = last_line(run)
    assert figures["tokens"] == sum(r.max_tokens for r in standard_workload(num_requests=16))
    assert figures["overlap"] is overlap
    assert all(math.isfinite(figures[key]) for key in KEYS)
    assert "throughput" in run.out


async def test_bench_offline_takes_the_workers_flags() -> None:
    command = ("bench", "offline", "--engine", "null", "--num-requests", "4", "--no-warm-up")
    assert (await tandem(*command, "--max-running", "2", "--page-size", "64")).code == 0
    refused = await tandem(*command, "--page-size", "3")
    assert refused.code == 2
    assert "power of two" in refused.err


async def test_bench_offline_names_a_shape_it_does_not_know() -> None:
    run = await tandem("bench", "offline", "--engine", "echo", "--shape", "no-such-shape")
    assert run.code == 2
    assert "qwen3-0.6b" in run.err


async def test_bench_serve_without_a_gateway_says_so() -> None:
    run = await tandem("bench", "serve", "--address", "127.0.0.1:1")
    assert run.code == 1
    assert run.err.startswith("error: UNAVAILABLE")


async def test_bench_serve_starts_and_stops_a_pair() -> None:
    run = await tandem(
        *("bench", "serve", "--start", "--clients", "2", "--num-requests", "2", "--"),
        *("--engine", "echo", "--max-context", "4096"),
    )
    assert run.code == 0, run.err
    assert last_line(run)["failed"] == 0


async def test_worker_flags_without_start_are_refused() -> None:
    run = await tandem("bench", "serve", "--shape", "qwen3-0.6b")
    assert run.code == 2
    assert "--start" in run.err
