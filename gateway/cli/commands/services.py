"""The commands that run the two services."""

import asyncio
from typing import Annotated

import typer

from gateway.cli import demo as demo_command
from gateway.cli import up as up_command
from gateway.cli.child import become
from gateway.cli.connection import DEFAULT_ADDRESS, DEFAULT_WORKER_ADDRESS, Token
from gateway.cli.options import GatewayProcesses, Model, WorkerArguments, worker_flags


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
    arguments = worker_flags(model, worker_arguments)
    options = up_command.UpOptions(
        listen,
        worker_listen,
        arguments,
        start_timeout_s=start_timeout,
        gateway_processes=gateway_processes,
    )
    raise typer.Exit(asyncio.run(up_command.up(options)))


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
    arguments = worker_flags(model, worker_arguments)
    run = demo_command.demo(question, arguments, token=token, shows_logs=logs)
    raise typer.Exit(asyncio.run(run))


def worker(context: typer.Context) -> None:
    """Run a worker; `tandem worker --help` lists its flags."""
    become("worker", context.args)


def gateway(context: typer.Context) -> None:
    """Run a gateway; `tandem gateway --help` lists its flags."""
    become("gateway", context.args)
