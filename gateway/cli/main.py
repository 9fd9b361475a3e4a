"""The command `tandem`: which commands there are, and in what order they are listed."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from gateway.cli.commands import calls, measurements, services
from gateway.cli.token import make_token
from shared.version import tandem_version

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


app.command()(services.up)
app.command()(services.demo)
app.command(context_settings=_PASS_THROUGH, add_help_option=False)(services.worker)
app.command(context_settings=_PASS_THROUGH, add_help_option=False)(services.gateway)
app.command()(calls.generate)
app.command()(calls.chat)
app.command()(calls.model)
app.command()(calls.health)
app.command("token")(make_token)
app.command()(measurements.trace)
bench_app.command(context_settings=_PASS_THROUGH, add_help_option=False)(measurements.offline)
bench_app.command()(measurements.serve)
