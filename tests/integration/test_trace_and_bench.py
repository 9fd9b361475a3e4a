"""`tandem trace` and `tandem bench serve` against real processes."""

import math
from pathlib import Path

from gateway.cli.trace_file import load_trace
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.workload import standard_workload
from tests.cli.bench_figures import KEYS, last_line
from tests.cli.terminal import tandem
from tests.integration.conftest import StartPair
from tests.integration.pair import Client, Pair


async def test_a_live_worker_is_recorded_and_drawn(start_pair: StartPair, tmp_path: Path) -> None:
    out, picture = tmp_path / "t.json.gz", tmp_path / "t.png"
    options = ("--steps", "30", "--out", str(out), "--png", str(picture))
    request = pb.GenerateRequest(
        text="one two three", max_tokens=4000, stopping=pb.StopConditions(ignore_eos=True)
    )
    args = ("--engine", "echo", "--echo-step-ms", "2", "--no-overlap", "--max-context", "8192")
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            call = client.stream(request)
            await call.read()
            run = await tandem("trace", "--address", pair.workers[0].address, *options)
            call.cancel()
    assert run.code == 0, run.err
    trace = load_trace(out)
    assert len(trace.steps) == 30
    assert trace.overlap is False
    assert {"receive", "plan", "launch", "wait", "commit"} <= {span.name for span in trace.host}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "device idle" in run.err


async def test_a_gateway_cannot_be_traced(echo_pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "t.json.gz"
    run = await tandem("trace", "--address", echo_pair.address, "--out", str(out))
    assert run.code == 1
    assert "a worker's address?" in run.err
    assert not out.exists()


async def test_bench_serve_measures_a_running_pair(echo_pair: Pair, tmp_path: Path) -> None:
    worker = echo_pair.workers[0].address
    kept = tmp_path / "trace.json.gz"
    run = await tandem(
        *("bench", "serve", "--address", echo_pair.address, "--worker-address", worker),
        *("--clients", "4", "--num-requests", "8", "--processes", "2", "--trace", str(kept)),
    )
    assert run.code == 0, run.err
    figures = last_line(run)
    assert figures["failed"] == 0
    assert figures["tokens"] == sum(r.max_tokens for r in standard_workload(num_requests=8))
    assert all(math.isfinite(figures[key]) for key in KEYS)
    assert 0 < figures["messages_per_token"] <= 1
    assert 0 <= figures["whole_run_idle_ratio"] <= 1
    assert load_trace(kept).steps


async def test_bench_serve_without_a_worker_to_ask_still_measures(echo_pair: Pair) -> None:
    run = await tandem(
        *("bench", "serve", "--address", echo_pair.address, "--worker-address", "127.0.0.1:1"),
        *("--clients", "2", "--num-requests", "2"),
    )
    assert run.code == 0, run.err
    figures = last_line(run)
    assert figures["tokens_per_s"] > 0
    assert figures["host_step_p50_ms"] is None
    assert "no figures of host and device" in run.err


async def test_bench_serve_that_runs_out_of_time_fails(slow_echo_pair: Pair) -> None:
    run = await tandem(
        *("bench", "serve", "--address", slow_echo_pair.address, "--worker-address", "127.0.0.1:1"),
        *("--clients", "2", "--num-requests", "2", "--timeout", "1"),
    )
    assert run.code == 1
    assert "DEADLINE_EXCEEDED" in run.err
    assert last_line(run)["failed"] == 2
