"""The commands that measure: a live worker, the engine alone, the pair under load."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli import bench_serve as bench_command
from gateway.cli import trace as trace_command
from gateway.cli.child import become
from gateway.cli.client import WorkerTarget
from gateway.cli.commands.endings import ExitCode, call
from gateway.cli.connection import (
    DEFAULT_ADDRESS,
    DEFAULT_WORKER_ADDRESS,
    Address,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsServerName,
    Token,
    checked_tls,
)
from gateway.cli.options import GatewayProcesses, Model, WorkerArguments, worker_flags
from gateway.cli.terminal import stderr_console, write_error
from gateway.cli.trace_file import TraceError


def trace(
    address: Annotated[str, typer.Option(help="The worker, host:port.")] = DEFAULT_WORKER_ADDRESS,
    steps: Annotated[int, typer.Option(help="How many to record.", min=1, max=10_000)] = 200,
    out: Annotated[Path, typer.Option(help="Perfetto opens it.")] = Path("trace.json.gz"),
    png: Annotated[Path | None, typer.Option(help="Draw the recording, too.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Draw two recordings above each other, and record nothing."),
    ] = None,
    token: Token = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
) -> None:
    """Record the next steps of a live worker: what host and device did, and when."""
    if compare is None:
        tls = checked_tls(tls_ca, tls_cert, tls_key, tls_server_name)
        worker = WorkerTarget(address, token, tls)
        call(trace_command.trace(trace_command.TraceOptions(worker, steps, out, png)))
        return
    try:
        trace_command.compare(*compare, png or Path("trace.png"))
    except (TraceError, OSError) as error:
        write_error(stderr_console(), str(error))
        raise typer.Exit(ExitCode.FAILED) from None


def offline(context: typer.Context) -> None:
    """Measure the engine process alone; `tandem bench offline --help` lists its flags."""
    become("worker.bench", context.args)


def serve(
    worker_arguments: WorkerArguments = None,
    clients: Annotated[int, typer.Option(help="Streams at once.", min=1)] = 256,
    num_requests: Annotated[int, typer.Option(help="In all.", min=1)] = 256,
    workload: Annotated[
        bench_command.Workload, typer.Option(help="What is sent.")
    ] = bench_command.Workload.STANDARD,
    processes: Annotated[
        int | None, typer.Option(help="Client processes; not set: by the cores.", min=1)
    ] = None,
    connections: Annotated[int, typer.Option(help="Of all clients together.", min=1)] = 16,
    address: Address = DEFAULT_ADDRESS,
    worker_address: Annotated[
        str, typer.Option(help="The worker, for the figures of host and device.")
    ] = DEFAULT_WORKER_ADDRESS,
    token: Token = "",
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.", min=1)] = 600.0,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    trace_out: Annotated[
        Path | None, typer.Option("--trace", help="Keep the recording of some steps.")
    ] = None,
    start: Annotated[bool, typer.Option(help="Start the pair for it, on free ports.")] = False,
    model: Model = "",
    shape: Annotated[
        str, typer.Option(help="qwen3-0.6b or qwen3-8b, with dummy weights; with --start.")
    ] = "",
    gateway_processes: GatewayProcesses = 1,
    logs: Annotated[bool, typer.Option(help="With --start: show what the two log.")] = False,
) -> None:
    """Measure a running pair with many streaming clients."""
    options = bench_command.ServeOptions(
        address=address,
        worker_address=worker_address,
        token=token,
        tls=checked_tls(tls_ca, tls_cert, tls_key, tls_server_name),
        num_clients=clients,
        num_requests=num_requests,
        num_processes=processes or bench_command.default_processes(),
        num_connections=connections,
        timeout_s=timeout,
        workload=workload,
        trace=trace_out,
    )
    arguments = [*bench_command.shape_arguments(shape), *worker_flags(model, worker_arguments)]
    if not start and arguments:
        raise typer.BadParameter("worker flags, --model and --shape go with --start")
    if start:
        run = bench_command.bench_started(
            options, arguments, shows_logs=logs, gateway_processes=gateway_processes
        )
        raise typer.Exit(asyncio.run(run))
    call(bench_command.bench_running(options))
