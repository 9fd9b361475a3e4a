"""The pair under `tests.bench.stream`: started with an echo engine, pinned, and read.

What a gateway process costs is the CPU time of all its threads, as the kernel counts it.
"""

import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from gateway.cli.pair import Service, ServiceCommand, free_address, running_pair
from shared.pb.tandem.v1 import inference_pb2 as public_pb
from shared.pb.tandem.v1 import inference_pb2_grpc as public_pb_grpc
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc

# Prompt and echo; the pool holds as much for every stream.
MAX_CONTEXT = 16_384

_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 10.0
_LAG = "tandem_worker_hop_lag_seconds"


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How the pair is started."""

    step_ms: float
    streams: int
    processes: int
    coalesce: bool
    is_pinned: bool
    # For comparison: the gateway's threads as the kernel would have them.
    without_batch: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """What had been done at one moment, since the start."""

    at: float
    cpu_s: float
    # Sampled by the engine.
    num_generated: int
    num_running: int
    metrics: Mapping[str, float]

    @property
    def num_delivered(self) -> float:
        """Counted when a request ends, however it does."""
        return self.metrics.get("tandem_generation_tokens_total", 0.0)

    @property
    def num_messages(self) -> float:
        """Likewise."""
        return self.metrics.get("tandem_stream_messages_total", 0.0)


class BenchPair:
    """A worker and a gateway at work."""

    def __init__(self, address: str, gateway_pid: int, channel: grpc.aio.Channel, port: int):
        self.address = address
        self._channel = channel
        self._stub = pb_grpc.WorkerServiceStub(channel)
        self._metrics_port = port
        self.processes = _serving_processes(gateway_pid)

    async def sample(self) -> Sample:
        load: pb.GetLoadResponse = await self._stub.GetLoad(
            pb.GetLoadRequest(), timeout=_CALL_TIMEOUT_S
        )
        return Sample(
            at=time.monotonic(),
            cpu_s=sum(_cpu_s(process) for process in self.processes),
            num_generated=load.generated_tokens,
            num_running=load.running,
            metrics=_read_metrics(self._metrics_port),
        )

    async def prompt_ids(self, text: str) -> list[int]:
        """The text's tokens, by the gateway's tokenizer."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = public_pb_grpc.InferenceServiceStub(channel)
            request = public_pb.TokenizeRequest(text=text, add_special_tokens=False)
            answer = await stub.Tokenize(request, timeout=_CALL_TIMEOUT_S)
        return list(answer.token_ids)


@asynccontextmanager
async def bench_pair(options: PairOptions) -> AsyncIterator[BenchPair]:
    """The pair, serving, with every gateway process on a core of its own where cores allow."""
    worker_address, metrics_address = free_address(), free_address()
    port = int(metrics_address.rpartition(":")[2])
    worker = ServiceCommand(
        "worker",
        worker_address,
        (
            *("--engine", "echo", "--echo-step-ms", str(options.step_ms)),
            *("--max-context", str(MAX_CONTEXT), "--max-running", str(options.streams)),
            *("--kv-pages", str(options.streams * MAX_CONTEXT // 16), "--page-size", "16"),
        ),
    )
    gateway = ServiceCommand(
        "gateway",
        free_address(),
        (
            *("--workers", worker_address, "--processes", str(options.processes)),
            *("--metrics-port", str(port), "--log-level", "error"),
            "--coalesce" if options.coalesce else "--no-coalesce",
        ),
    )
    async with running_pair(worker, gateway, _show_complaints) as pair:
        for service in (pair.worker, pair.gateway):
            await pair.wait_serving(service, _START_TIMEOUT_S)
        async with grpc.aio.insecure_channel(worker_address) as channel:
            bench = BenchPair(pair.gateway.address, _pid(pair.gateway), channel, port)
            assert len(bench.processes) == options.processes
            if options.is_pinned:
                _pin(bench.processes, _pid(pair.worker))
            if options.without_batch:
                _schedule_as_others(bench.processes)
            yield bench


def lag_quantile_ms(before: Sample, after: Sample, quantile: float) -> float:
    """Of the hop's lag between two samples; linear within a bucket of the histogram."""
    bounds = sorted(
        (float(name.split('le="')[1].rstrip('"}')), name)
        for name in after.metrics
        if name.startswith(f"{_LAG}_bucket")
    )
    counts = [after.metrics[name] - before.metrics.get(name, 0.0) for _, name in bounds]
    if not counts or not counts[-1]:
        return float("nan")
    wanted = quantile * counts[-1]
    low_s, low_count = 0.0, 0.0
    for (high_s, _), count in zip(bounds, counts, strict=True):
        if count >= wanted:
            share = (wanted - low_count) / max(count - low_count, 1.0)
            return 1e3 * (low_s + share * (high_s - low_s))
        low_s, low_count = high_s, count
    return float("nan")


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _show_complaints(name: str, line: str) -> None:
    if name == "gateway" and line:
        print(f"{name}: {line}", file=sys.stderr)


def _pid(service: Service) -> int:
    assert service.pid is not None
    return service.pid


def _serving_processes(gateway_pid: int) -> list[psutil.Process]:
    parent = psutil.Process(gateway_pid)
    return parent.children() or [parent]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _pin(gateways: Sequence[psutil.Process], worker_pid: int) -> None:
    """The first cores to the gateway's processes, the rest to the worker and to this one.

    The load, which this process starts, goes with it.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= len(gateways):
        return
    for process, core in zip(gateways, cores, strict=False):
        _set_affinity(process.pid, {core})
    others = set(cores[len(gateways) :])
    worker = psutil.Process(worker_pid)
    for process in (worker, *worker.children(recursive=True)):
        _set_affinity(process.pid, others)
    os.sched_setaffinity(0, others)


def _set_affinity(pid: int, cores: set[int]) -> None:
    for thread in _threads(pid):
        os.sched_setaffinity(thread, cores)


def _schedule_as_others(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        for thread in _threads(process.pid):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _threads(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def _read_metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}
