"""The command `tandem`: declares its commands and options, and nothing else."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway.cli import bench_serve as bench_command
from gateway.cli import demo as demo_command
from gateway.cli import health as health_command
from gateway.cli import trace as trace_command
from gateway.cli import up as up_command
from gateway.cli.bench_pool import BenchError
from gateway.cli.chat import chat as run_chat
from gateway.cli.child import python_command
from gateway.cli.client import CallError, WorkerTarget
from gateway.cli.connection import (
    DEFAULT_ADDRESS,
    DEFAULT_WORKER_ADDRESS,
    Address,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsServerName,
    Token,
    checked_tls,
    target,
)
from gateway.cli.generate import GenerateOptions, build_request, generate_json
from gateway.cli.generate import generate as stream_generate
from gateway.cli.model import show_model
from gateway.cli.options import (
    AsJson,
    Choice,
    FrequencyPenalty,
    GatewayProcesses,
    Grammar,
    JsonObject,
    JsonSchema,
    MaxTokens,
    MinP,
    MinTokens,
    Model,
    NumCompletions,
    NumLogprobs,
    PresencePenalty,
    Regex,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TemplateKwargs,
    TopK,
    TopP,
    WorkerArguments,
    structured_output,
)
from gateway.cli.terminal import stderr_console, write_error
from gateway.cli.token import make_token
from gateway.cli.trace_file import TraceError
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.version import tandem_version


class ExitCode(IntEnum):
    """What the shell sees, besides 0."""

    FAILED = 1
    # As shells report a program that Ctrl-C ended.
    INTERRUPTED = 130


app = typer.Typer(
    name="tandem",
    help="Serve a language model over gRPC, and talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench_app = typer.Typer(help="Measure an engine alone, or the pair under load.")
app.add_typer(bench_app, name="bench", no_args_is_help=True)

# For the commands that hand every flag on, --help too.
_PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {tandem_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    # A terminal that cannot show a character gets a "?" rather than a traceback.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@app.command()
def up(
    worker_arguments: WorkerArguments = None,
    model: Model = "",
    listen: Annotated[
        str, typer.Option(help="The gateway's address, host:port.")
    ] = DEFAULT_ADDRESS,
    worker_listen: Annotated[
        str, typer.Option(help="The worker's address, host:port.")
    ] = DEFAULT_WORKER_ADDRESS,
    start_timeout: Annotated[
        float, typer.Option(help="Seconds that loading may take.", min=1)
    ] = up_command.START_TIMEOUT_S,
    gateway_processes: GatewayProcesses = 1,
) -> None:
    """Run a worker and a gateway in this terminal; Ctrl-C stops both."""
    arguments = _worker_arguments(model, worker_arguments)
    options = up_command.UpOptions(
        listen,
        worker_listen,
        arguments,
        start_timeout_s=start_timeout,
        gateway_processes=gateway_processes,
    )
    raise typer.Exit(asyncio.run(up_command.up(options)))


@app.command()
def demo(
    question: Annotated[
        str, typer.Argument(help="What to ask.")
    ] = "What is the capital of France? Answer in one sentence.",
    worker_arguments: WorkerArguments = None,
    model: Model = "",
    token: Token = "",
    logs: Annotated[bool, typer.Option(help="Show what the two services log.")] = False,
) -> None:
    """Start both services on free ports, stream one answer, stop both."""
    arguments = _worker_arguments(model, worker_arguments)
    run = demo_command.demo(question, arguments, token=token, shows_logs=logs)
    raise typer.Exit(asyncio.run(run))


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def worker(context: typer.Context) -> None:
    """Run a worker; `tandem worker --help` lists its flags."""
    _become("worker", context.args)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run a gateway; `tandem gateway --help` lists its flags."""
    _become("gateway", context.args)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    is_chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="As a user's chat message, or as it stands."),
    ] = True,
    system: System = "",
    template_kwargs: TemplateKwargs = "",
    n: NumCompletions = None,
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: NumLogprobs = None,
    json_schema: JsonSchema = "",
    json_object: JsonObject = False,
    regex: Regex = "",
    grammar: Grammar = "",
    choice: Choice = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    timeout: Timeout = None,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    as_json: AsJson = False,
) -> None:
    """Stream a completion, or several, to the terminal."""
    sampling = pb.SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
    options = GenerateOptions(
        is_chat=is_chat,
        system=system,
        template_kwargs_json=template_kwargs,
        max_tokens=max_tokens,
        num_completions=n,
        sampling=sampling,
        stopping=pb.StopConditions(stop_strings=stop, min_tokens=min_tokens),
        output=pb.OutputOptions(logprobs=logprobs),
        structured_output=structured_output(json_schema, json_object, regex, grammar, choice),
    )
    request = build_request(options, [pb.ChatMessage(role="user", content=_prompt(prompt))])
    run = generate_json if as_json else stream_generate
    tls = (tls_ca, tls_cert, tls_key, tls_server_name)
    _call(run(target(address, token, timeout, tls), request))


@app.command()
def chat(
    system: System = "",
    template_kwargs: TemplateKwargs = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds for an answer.")] = None,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
) -> None:
    """Talk with the model; /help lists what a line can do."""
    options = GenerateOptions(
        system=system,
        template_kwargs_json=template_kwargs,
        max_tokens=max_tokens,
        sampling=pb.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
        ),
        stopping=pb.StopConditions(stop_strings=stop),
    )
    tls = (tls_ca, tls_cert, tls_key, tls_server_name)
    run_chat(target(address, token, timeout, tls), options)


@app.command()
def model(
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    timeout: Timeout = 10.0,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    as_json: AsJson = False,
) -> None:
    """Show what is served."""
    tls = (tls_ca, tls_cert, tls_key, tls_server_name)
    _call(show_model(target(address, token, timeout, tls), as_json=as_json))


@app.command()
def health(
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option(help="A service's full name.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds.", min=0.001)] = 5.0,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
) -> None:
    """Ask a gateway or a worker for its health; exit code 0 when it is SERVING."""
    tls = checked_tls(tls_ca, tls_cert, tls_key, tls_server_name)
    answer = health_command.probe(address, service=service, timeout_s=timeout, tls=tls)
    typer.echo(answer)
    if answer != "SERVING":
        raise typer.Exit(ExitCode.FAILED)


app.command("token")(make_token)


@app.command()
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
        _call(trace_command.trace(trace_command.TraceOptions(worker, steps, out, png)))
        return
    try:
        trace_command.compare(*compare, png or Path("trace.png"))
    except (TraceError, OSError) as error:
        write_error(stderr_console(), str(error))
        raise typer.Exit(ExitCode.FAILED) from None


@bench_app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def offline(context: typer.Context) -> None:
    """Measure the engine process alone; `tandem bench offline --help` lists its flags."""
    _become("worker.bench", context.args)


@bench_app.command()
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
    arguments = [*bench_command.shape_arguments(shape), *_worker_arguments(model, worker_arguments)]
    if not start and arguments:
        raise typer.BadParameter("worker flags, --model and --shape go with --start")
    if start:
        run = bench_command.bench_started(
            options, arguments, shows_logs=logs, gateway_processes=gateway_processes
        )
        raise typer.Exit(asyncio.run(run))
    _call(bench_command.bench_running(options))


def _worker_arguments(model: str, more: list[str] | None) -> list[str]:
    return [*(["--model", model] if model else []), *(more or [])]


def _prompt(argument: str) -> str:
    raw = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    # Bytes that are no UTF-8 cannot be sent; each becomes a replacement character.
    return raw.decode(errors="replace")


def _become(module: str, arguments: list[str]) -> NoReturn:
    command = python_command(module, *arguments)
    os.execv(command[0], command)


def _call(work: Coroutine[Any, Any, None]) -> None:
    """Runs a call to its end; a failure is one line on stderr and an exit code."""
    try:
        asyncio.run(work)
    except (CallError, TraceError, BenchError, OSError) as error:
        write_error(stderr_console(), str(error))
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        stderr_console().print("\n[dim]cancelled[/]")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
