"""The options of every command that calls a server: where it is, and how to be let in."""

from typing import Annotated

import typer

from gateway.cli.client import Target
from shared.errors import SettingsError
from shared.tls import ClientTls, channel_credentials, client_tls

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_WORKER_ADDRESS = "127.0.0.1:50052"

Address = Annotated[
    str, typer.Option(help="The gateway, host:port.", envvar="TANDEM_ADDRESS", show_default=True)
]
Token = Annotated[
    str, typer.Option(help="The server's bearer token, if it wants one.", envvar="TANDEM_TOKEN")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds for the whole call.", min=0.001)]
TlsCa = Annotated[
    str,
    typer.Option(
        help="Speak TLS: the server's authorities as a PEM file, or public.", envvar="TANDEM_TLS_CA"
    ),
]
TlsCert = Annotated[
    str,
    typer.Option(
        help="PEM file of a certificate, for a server that asks for one.", envvar="TANDEM_TLS_CERT"
    ),
]
TlsKey = Annotated[str, typer.Option(help="PEM file of its key.", envvar="TANDEM_TLS_KEY")]
TlsServerName = Annotated[
    str,
    typer.Option(
        help="The name in the server's certificate, if not its address.",
        envvar="TANDEM_TLS_SERVER_NAME",
    ),
]


def checked_tls(ca: str, cert: str, key: str, server_name: str) -> ClientTls | None:
    """What the options say; a file that cannot be used is a wrong option."""
    try:
        tls = client_tls(ca, cert, key, server_name)
        if tls is not None:
            channel_credentials(tls)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    return tls


def target(
    address: str, token: str, timeout: float | None, tls: tuple[str, str, str, str]
) -> Target:
    """The gateway to call."""
    return Target(address, token, timeout, checked_tls(*tls))
