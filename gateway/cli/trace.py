"""`tandem trace`: records steps of a live worker, and draws what host and device did."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import grpc

from gateway.cli.client import CallError, WorkerTarget
from gateway.cli.terminal import stderr_console
from gateway.cli.trace_file import Trace, TraceError, load_trace, parse_trace, with_about
from shared.auth import bearer_metadata
from shared.grpc_options import channel_options
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from shared.tls import open_channel

# A worker answers within 30 s, with the steps that it had by then.
_TRACE_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What to record and where to put it; no `picture`: none is drawn."""

    worker: WorkerTarget
    num_steps: int
    out: Path
    picture: Path | None = None


async def trace(options: TraceOptions) -> None:
    """Records, writes the file and draws the picture. Raises CallError and TraceError."""
    console = stderr_console()
    if options.picture is not None:
        # Before a recording that could then not be drawn.
        _drawing()
    with console.status(f"recording {options.num_steps} steps at {options.worker.address}"):
        recorded = await record(options.worker, options.num_steps)
    shown = parse_trace(recorded, options.worker.address)
    if not shown.steps:
        raise TraceError(
            f"no step ran at {options.worker.address} meanwhile; send it requests and retry"
        )
    options.out.write_bytes(recorded)
    console.print(f"{len(shown.steps)} steps in {options.out}; ui.perfetto.dev opens it")
    console.print(describe(shown), markup=False)
    if options.picture is not None:
        _drawing().draw_trace(shown, options.picture)
        console.print(f"picture in {options.picture}")


def compare(first: Path, second: Path, picture: Path) -> None:
    """Draws two recordings above each other at one scale. Raises TraceError."""
    upper, lower = load_trace(first), load_trace(second)
    for path, shown in ((first, upper), (second, lower)):
        if len(shown.steps) < 2:
            raise TraceError(f"{path} has fewer than two steps")
    _drawing().draw_comparison(upper, lower, picture)
    console = stderr_console()
    for path, shown in ((first, upper), (second, lower)):
        console.print(f"{path}: {describe(shown)}", markup=False)
    console.print(f"picture in {picture}")


async def record(worker: WorkerTarget, num_steps: int) -> bytes:
    """The worker's recording, with what it serves written into it. Raises CallError."""
    metadata = bearer_metadata(worker.token)
    async with open_channel(worker.address, worker.tls, channel_options()) as channel:
        stub = pb_grpc.WorkerServiceStub(channel)
        try:
            model = await stub.GetModel(
                pb.GetModelRequest(), timeout=_CALL_TIMEOUT_S, metadata=metadata
            )
            request = pb.TraceRequest(num_steps=num_steps)
            response = await stub.Trace(request, timeout=_TRACE_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            advice = f"is {worker.address} a worker's address? A gateway cannot be traced"
            is_lost = error.code() in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.UNIMPLEMENTED,
            )
            details = error.details() or "no details"
            raise CallError(error.code().name, details, advice if is_lost else "") from None
    about = {
        "model": model.model,
        "dtype": model.dtype,
        "device": model.device,
        "overlap": model.overlap_scheduling,
        "version": model.version,
    }
    return with_about(response.trace_json_gz, about)


def describe(shown: Trace) -> str:
    """The recording's figures in one line."""
    steps = shown.full_decode_steps()
    parts = []
    if (interval := shown.interval_ms(steps)) is not None:
        parts.append(f"step {interval:.2f} ms")
    if (host := shown.host_ms(steps)) is not None:
        parts.append(f"host plan + commit {host:.2f} ms")
    if (idle := shown.idle_ratio(steps)) is not None:
        parts.append(f"device idle {idle:.1%}")
    return " · ".join(parts) or "too few steps for figures"


def _drawing() -> ModuleType:
    """The module that draws. Raises TraceError without matplotlib, which is an extra."""
    try:
        from gateway.cli import trace_picture  # noqa: PLC0415
    except ImportError as error:
        raise TraceError(
            f"a picture needs matplotlib ({error}); install it with: pip install 'tandem[plot]'"
        ) from error
    return trace_picture
