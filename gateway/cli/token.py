"""`tandem token`: a new bearer token, and the line that makes a server know it."""

import secrets
from typing import Annotated

import typer

from shared.errors import SettingsError
from shared.tokens import hash_line

_NUM_BYTES = 32
# Never a dash at the front, which flags would take for one of theirs; and to be found by
# those who search for secrets where they should not be.
_PREFIX = "tandem_"


def make_token(
    name: Annotated[
        str, typer.Option(help="The client's name, for logs, metrics and fair sharing.")
    ] = "",
) -> None:
    """Make a bearer token: the first line is for the client, the second for --tokens-file."""
    token = _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    try:
        line = hash_line(name, token)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{token}\n{line}")
