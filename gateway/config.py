"""The gateway's settings: one declaration gives each its flag and environment variable.

`--max-live-requests 64` and `TANDEM_GATEWAY_MAX_LIVE_REQUESTS=64` are the same; the flag wins.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, SecretStr, ValidationError
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict

from gateway.discovery import worker_place
from shared.grpc_options import MAX_MESSAGE_BYTES
from shared.settings import complaints

EXIT_BAD_CONFIGURATION = 2
# As a worker that cannot listen.
EXIT_CANNOT_LISTEN = 2

_MOST_PROCESSES = 8


def _split(value: Any) -> Any:
    """A comma-separated list, as flags and variables have it."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        return [part.strip() for item in value for part in str(item).split(",") if part.strip()]
    return value


def _checked_places(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        worker_place(value)
    return values


_Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), Field(min_length=1)]
_Workers = Annotated[_Addresses, AfterValidator(_checked_places)]
_Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]
_Processes = Annotated[PositiveInt | None, BeforeValidator(lambda v: None if v == "auto" else v)]


class GatewayConfig(BaseSettings):
    """Serves text over gRPC, from workers that serve tokens."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_GATEWAY_",
        cli_prog_name="tandem gateway",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        frozen=True,
    )

    listen: str = Field(
        default="127.0.0.1:50051", min_length=1, description="address to serve gRPC on"
    )
    workers: _Workers = Field(
        default=("127.0.0.1:50052",),
        description="addresses of the workers, separated by commas; dns:///name:port: all that "
        "the name stands for, now and later",
    )
    discovery_interval_s: float = Field(
        default=5.0, gt=0, description="until the workers' names are resolved again"
    )
    routing: Literal["prefix", "power-of-two", "least-loaded"] = Field(
        default="prefix",
        description="which worker gets a request; prefix: the one that has most of the prompt "
        "cached, weighed with load",
    )
    processes: _Processes = Field(
        default=None,
        description="that share the port; auto: one less than the cores it may use, 1 to 8",
    )
    tokens: _Secrets = Field(
        default=(),
        description="bearer tokens that clients may bring, separated by commas; none: open",
    )
    tokens_file: str = Field(
        default="",
        description="file of further bearer tokens or their hashes, one a line; read again "
        "when it changes and on SIGHUP",
    )
    client_metadata_key: str = Field(
        default="",
        pattern="^[a-z0-9_.-]*$",
        description="metadata key that names the client where no tokens are set; empty: none",
    )
    tls_cert: str = Field(
        default="", description="PEM file of the certificate chain; empty: no TLS"
    )
    tls_key: str = Field(default="", description="PEM file of its key")
    tls_client_ca: str = Field(
        default="", description="PEM file of authorities; clients must have a certificate of theirs"
    )
    worker_tls_ca: str = Field(
        default="",
        description="PEM file of the workers' authorities, or public; empty: no TLS to workers",
    )
    worker_tls_cert: str = Field(
        default="", description="PEM file of the certificate chain for workers that ask for one"
    )
    worker_tls_key: str = Field(default="", description="PEM file of its key")
    worker_tls_server_name: str = Field(
        default="", description="name in the workers' certificates, if not their address"
    )
    worker_token_file: str = Field(
        default="", description="file that holds the bearer token for workers that ask for one"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the Prometheus endpoint")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="its port; 0: none")
    max_live_requests: int = Field(
        default=4096, ge=1, description="most requests at once, in each process"
    )
    max_message_bytes: int = Field(
        default=MAX_MESSAGE_BYTES,
        ge=1 << 16,
        description="gRPC message cap; towards workers never less than the default",
    )
    max_prompt_bytes: int = Field(default=8 << 20, ge=1, description="most bytes of text to encode")
    max_delta_tokens: int = Field(default=1024, ge=1, description="most tokens in one delta")
    coalesce: bool = Field(
        default=True,
        description="tokens of a stream wait for each other while steps arrive late: 2, 4 or 8",
    )
    default_timeout_s: float = Field(
        default=0.0, ge=0, description="for requests without a deadline; 0: none"
    )
    slow_reader_limit_s: float = Field(
        default=60.0, gt=0, description="until a client that does not read is cut off"
    )
    template_limit_s: float = Field(default=2.0, gt=0, description="to render one chat")
    tokenizer_threads: int = Field(
        default=2, ge=1, le=64, description="threads that encode prompts"
    )
    worker_silence_limit_s: float = Field(
        default=10.0, gt=0, description="without a sign of a worker until it counts as lost"
    )
    breaker_threshold: int = Field(
        default=3, ge=1, description="faults in a row that make a worker suspect"
    )
    breaker_cool_down_s: float = Field(
        default=5.0, ge=0, description="for which others are preferred"
    )
    drain_grace_s: float = Field(default=30.0, ge=0, description="for live requests after SIGTERM")
    log_format: Literal["auto", "human", "json"] = Field(
        default="auto", description="of a log line"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least"
    )


def load_config(arguments: Sequence[str]) -> GatewayConfig:
    """The settings of this process.

    Ends the process: with 0 after --help, with 2 and a line for each wrong setting.
    """
    try:
        return CliApp.run(GatewayConfig, cli_args=list(arguments))
    except ValidationError as error:
        for line in complaints("tandem gateway", GatewayConfig, error):
            print(line, file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)


def resolved_processes(processes: int | None, cores: int) -> int:
    """How many; "auto", which is None, leaves a core to the worker.

    Only on Linux do processes that share a port share its connections.
    """
    if processes is not None:
        return processes
    if sys.platform != "linux":
        return 1
    return max(1, min(_MOST_PROCESSES, cores - 1))
