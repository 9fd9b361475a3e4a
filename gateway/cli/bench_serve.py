"""`tandem bench serve`: many streaming clients against a running pair, and what it gave them."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.bench_client import ClientTask, Result
from gateway.cli.bench_pool import BenchError, ClientPool
from gateway.cli.client import CallError, Client, Target, WorkerTarget
from gateway.cli.pair import Pair, free_address
from gateway.cli.terminal import stderr_console, write_error
from gateway.cli.trace import record
from gateway.cli.trace_file import Trace, parse_trace
from gateway.cli.up import UpOptions, run_pair
from shared import bench_report
from shared.auth import bearer_metadata
from shared.cores import usable_cores
from shared.grpc_options import channel_options
from shared.pb.tandem.v1 import inference_pb2 as public_pb
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from shared.tasks import TaskSet
from shared.tls import ClientTls, open_channel
from shared.workload import STANDARD, STANDARD_CONTEXT, WorkloadRequest, standard_workload

_CALL_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 60.0
# Beyond the calls' own timeout: parsing what came, and the recording's end.
_PARSE_TIMEOUT_S = 60.0
_RECORDING_TIMEOUT_S = 10.0
_MOST_RECORDED_STEPS = 256


class Workload(StrEnum):
    """What can be sent."""

    STANDARD = STANDARD


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Whom to load, and how much."""

    address: str
    # For the figures of host and device; the gateway does not have them.
    worker_address: str
    token: str
    num_clients: int
    num_requests: int
    num_processes: int
    num_connections: int
    timeout_s: float
    workload: Workload
    # None: in the clear, gateway and worker alike.
    tls: ClientTls | None = None
    # Keeps the recording that the host's figures come from.
    trace: Path | None = None

    @property
    def worker(self) -> WorkerTarget:
        return WorkerTarget(self.worker_address, self.token, self.tls)


@dataclass(slots=True)
class _Engine:
    """What the worker said of the run; None where it was out of reach."""

    idle_s: float | None = None
    trace: Trace | None = None


def default_processes() -> int:
    """A quarter of the cores: the pair needs the rest."""
    return max(1, min(8, usable_cores() // 4))


def shape_arguments(shape: str) -> list[str]:
    """A worker's flags for a model shape with random weights."""
    if not shape:
        return []
    return ["--model", shape, "--dummy-weights", "--max-context", str(STANDARD_CONTEXT)]


async def bench_running(options: ServeOptions) -> None:
    """Loads a pair that runs. Raises CallError and BenchError, also when a request failed."""
    if not await bench_serve(options):
        raise BenchError("not every request was served")


async def bench_started(
    options: ServeOptions,
    worker_arguments: Sequence[str],
    *,
    shows_logs: bool,
    gateway_processes: int = 1,
) -> int:
    """Starts a pair on free ports, loads it, stops it. Returns the exit code."""
    console = stderr_console()
    pair_options = UpOptions(
        gateway_address=free_address(),
        worker_address=free_address(),
        worker_arguments=worker_arguments,
        shows_logs=shows_logs,
        gateway_processes=gateway_processes,
    )
    is_served = False

    async def load(pair: Pair) -> None:
        nonlocal is_served
        try:
            is_served = await bench_serve(
                replace(options, address=pair.gateway.address, worker_address=pair.worker.address)
            )
        except BenchError as error:
            write_error(console, str(error))

    code = await run_pair(pair_options, console, load)
    return code or (0 if is_served else 1)


async def bench_serve(options: ServeOptions) -> bool:
    """Runs the workload, prints the figures. Whether every request was served to its end.

    Raises CallError and BenchError.
    """
    async with Client(_gateway(options)) as client:
        model = await client.model()
    bench_report.header("tandem bench serve")
    requests = standard_workload(num_requests=options.num_requests)
    engine = _Engine()
    async with ClientPool(_tasks(options, requests)) as pool:
        await pool.wait_ready(_CONNECT_TIMEOUT_S)
        idle_before = await _idle_s(options.worker)
        await _run(pool, options, requests, engine)
        idle_after = await _idle_s(options.worker)
        results = pool.results
    if idle_before is not None and idle_after is not None:
        engine.idle_s = idle_after - idle_before
    _report(options, model, results, engine)
    failures = [failure for result in results for failure in result.failures]
    if failures:
        stderr_console().print(f"{len(failures)} failed; the first: {failures[0]}", markup=False)
    return not failures


async def _run(
    pool: ClientPool,
    options: ServeOptions,
    requests: Sequence[WorkloadRequest],
    engine: _Engine,
) -> None:
    """From the first request to the last answer; fills in the recording."""
    # So few that the longest streams outlast the recording.
    longest = max(request.max_tokens for request in requests)
    num_steps = max(1, min(_MOST_RECORDED_STEPS, longest // 3))
    num_wanted = min(options.num_clients, len(requests))
    async with TaskSet() as tasks:
        pool.go()
        showing = tasks.start(_show_progress(pool), name="progress")
        recording = tasks.start(
            _record_once_flowing(pool, options, num_wanted, num_steps), name="recording"
        )
        await pool.wait_done(options.timeout_s + _PARSE_TIMEOUT_S)
        showing.cancel()
        if pool.num_flowing >= num_wanted:
            await asyncio.wait({recording}, timeout=_RECORDING_TIMEOUT_S)
        if recording.done():
            engine.trace = recording.result()


async def _record_once_flowing(
    pool: ClientPool, options: ServeOptions, num_wanted: int, num_steps: int
) -> Trace | None:
    """Records steps as soon as every client has had a token: the batch is full then."""
    await pool.news.until(lambda: pool.num_flowing >= num_wanted)
    try:
        recorded = await record(options.worker, num_steps)
    except CallError as error:
        stderr_console().print(f"no figures of host and device: {error}", style="dim", markup=False)
        return None
    if options.trace is not None:
        options.trace.write_bytes(recorded)
    return parse_trace(recorded, options.worker_address)


async def _show_progress(pool: ClientPool) -> None:
    console = Console(stderr=True)
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} messages"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)
        while True:
            progress.update(task, completed=pool.num_messages)
            await pool.news.changed()


def _gateway(options: ServeOptions) -> Target:
    return Target(options.address, options.token, _CALL_TIMEOUT_S, options.tls)


async def _idle_s(worker: WorkerTarget) -> float | None:
    """Seconds that the device had nothing to do so far; None when nobody answers."""
    async with open_channel(worker.address, worker.tls, channel_options()) as channel:
        stub = pb_grpc.WorkerServiceStub(channel)
        metadata = bearer_metadata(worker.token)
        try:
            load = await stub.GetLoad(
                pb.GetLoadRequest(), timeout=_CALL_TIMEOUT_S, metadata=metadata
            )
        except grpc.aio.AioRpcError:
            return None
    return float(load.idle_s)


def _tasks(options: ServeOptions, requests: Sequence[WorkloadRequest]) -> list[ClientTask]:
    """Clients dealt out to processes, requests to clients."""
    num_clients = min(options.num_clients, len(requests))
    num_processes = min(options.num_processes, num_clients)
    clients = [requests[i::num_clients] for i in range(num_clients)]
    salt = uuid.uuid4().hex
    return [
        ClientTask(
            address=options.address,
            token=options.token,
            tls=options.tls,
            clients=clients[i::num_processes],
            num_connections=max(1, options.num_connections // num_processes),
            timeout_s=options.timeout_s,
            cache_salt=salt,
        )
        for i in range(num_processes)
    ]


def _report(
    options: ServeOptions,
    model: public_pb.GetModelResponse,
    results: Sequence[Result],
    engine: _Engine,
) -> None:
    seconds = max(result.end for result in results) - min(result.begin for result in results)
    num_tokens = sum(result.num_tokens for result in results)
    num_deltas = sum(result.num_deltas for result in results)
    ttft_s = np.concatenate([result.ttft_s for result in results])
    itl_s = np.concatenate([result.itl_s for result in results])
    steps = engine.trace.full_decode_steps() if engine.trace else []
    figures = {
        "tokens_per_s": num_tokens / seconds,
        "ttft_p50_ms": _percentile_ms(ttft_s, 50),
        "itl_p50_ms": _percentile_ms(itl_s, 50),
        "itl_p99_ms": _percentile_ms(itl_s, 99),
        "host_step_p50_ms": engine.trace.host_ms(steps) if engine.trace else None,
        "device_idle_ratio": engine.trace.idle_ratio(steps) if engine.trace else None,
        "whole_run_idle_ratio": None if engine.idle_s is None else engine.idle_s / seconds,
        "messages_per_token": num_deltas / num_tokens if num_tokens else None,
    }
    shown, percent = bench_report.shown, bench_report.percent
    overlap = "on" if model.overlap_scheduling else "off"
    bench_report.table(
        f"{model.model}, {model.device}, overlap {overlap}, {options.num_clients} clients",
        {
            "requests": f"{options.num_requests:,}",
            "tokens": f"{num_tokens:,} in {seconds:,.2f} s",
            "throughput": shown(figures["tokens_per_s"], "tokens/s", 0),
            "time to first token, p50": shown(figures["ttft_p50_ms"], "ms"),
            "between messages, p50": shown(figures["itl_p50_ms"], "ms"),
            "between messages, p99": shown(figures["itl_p99_ms"], "ms"),
            "messages per token": shown(figures["messages_per_token"], ""),
            "full decode steps: host plan + commit, p50": shown(figures["host_step_p50_ms"], "ms"),
            "… device idle": percent(figures["device_idle_ratio"]),
            "device idle, whole run": percent(figures["whole_run_idle_ratio"]),
        },
    )
    bench_report.result(
        {name: bench_report.rounded(value, 4) for name, value in figures.items()}
        | {
            "seconds": round(seconds, 3),
            "requests": options.num_requests,
            "clients": options.num_clients,
            "failed": sum(len(result.failures) for result in results),
            "tokens": num_tokens,
            "model": model.model,
            "overlap": model.overlap_scheduling,
        }
    )


def _percentile_ms(seconds: NDArray[np.float64], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if len(seconds) else None
