"""The worker's settings: one declaration gives each its flag and environment variable.

`--page-size 16` and `TANDEM_WORKER_PAGE_SIZE=16` are the same; the flag wins. None is
written "auto" and is resolved once, here or by the engine, which knows the model.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from shared.grpc_options import MAX_MESSAGE_BYTES
from shared.settings import complaints

BUILT_IN_MODEL = "smollm2-135m-instruct"
DISABLE_OVERLAP_VARIABLE = "TANDEM_DISABLE_OVERLAP_SCHEDULING"
EXIT_BAD_CONFIGURATION = 2


# Literals rather than enums, because --help prints an enum's names, not its values.
EngineName = Literal["cpu", "cuda", "echo"]
DtypeName = Literal["float32", "bfloat16"]
PolicyName = Literal["mixed", "prefill-first"]
LogFormatName = Literal["human", "json"]


class WorkerConfig(BaseSettings):
    """Serves one model over gRPC to gateways."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_WORKER_",
        cli_prog_name="tandem worker",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_parse_none_str="auto",
        env_parse_none_str="auto",
        frozen=True,
        protected_namespaces=(),
    )

    model: str = Field(
        default=BUILT_IN_MODEL,
        min_length=1,
        description="a folder, a hub id, a .gguf file, or the built-in model's name",
    )
    served_model_name: str = Field(
        default="", description="name that clients see; empty: the model's own"
    )
    engine: EngineName | None = Field(
        default=None, description="what runs the steps; auto: cuda where it can"
    )
    listen: str = Field(
        default="127.0.0.1:50052", min_length=1, description="address to serve gRPC on"
    )
    tokens_file: str = Field(
        default="",
        description="file of bearer tokens or their hashes that gateways must bring one of; "
        "read again when it changes and on SIGHUP; empty: open",
    )
    tls_cert: str = Field(
        default="", description="PEM file of the certificate chain; empty: no TLS"
    )
    tls_key: str = Field(default="", description="PEM file of its key")
    tls_client_ca: str = Field(
        default="",
        description="PEM file of authorities; gateways must have a certificate of theirs",
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the Prometheus endpoint")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="its port; 0: none")
    dtype: DtypeName | None = Field(default=None, description="of weights and KV cache")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of a step; auto: every core"
    )
    page_size: int = Field(
        default=16, ge=1, le=1024, description="tokens in a KV page; a power of two"
    )
    kv_pages: int | None = Field(
        default=None, ge=2, description="pages in the KV pool; auto: by memory"
    )
    memory_fraction: float | None = Field(
        default=None, gt=0, lt=1, description="of the device's free memory, for the KV pool"
    )
    max_running: int | None = Field(
        default=None, ge=1, le=4096, description="most requests in a step"
    )
    max_waiting: int = Field(default=1024, ge=0, description="most requests in the queue")
    max_context: int | None = Field(default=None, ge=2, description="most tokens of a request")
    token_budget: int | None = Field(default=None, ge=1, description="most tokens in a step")
    policy: PolicyName = Field(
        default="mixed", description="mixed: running streams stay fluent; prefill-first: throughput"
    )
    prefix_caching: bool = Field(default=True, description="keep prompts' KV for later requests")
    overlap: bool = Field(
        default=True, description="plan and launch a step while the one before it computes"
    )
    dummy_weights: bool = Field(default=False, description="random weights from the config alone")
    cuda_graphs: bool = Field(default=True, description="cuda engine: capture decode steps")
    structure_cache: int = Field(
        default=128, ge=1, description="compiled rules of structured output to keep"
    )
    structure_timeout_s: float = Field(
        default=10.0, gt=0, description="for such a rule to be compiled until it is refused"
    )
    default_max_tokens: int = Field(default=1024, ge=1, description="when a request sets none")
    echo_step_ms: float = Field(default=1.0, ge=0, description="echo engine: time of a step")
    drain_grace_s: float = Field(default=30.0, ge=0, description="for live requests after SIGTERM")
    heartbeat_timeout_s: float = Field(
        default=15.0, gt=0, description="without a sign of the engine until health is NOT_SERVING"
    )
    hang_timeout_s: float = Field(
        default=300.0, gt=0, description="without a sign of the engine until it is started anew"
    )
    max_message_bytes: int = Field(
        # The longest prompts and outputs come through.
        default=MAX_MESSAGE_BYTES,
        ge=8 << 20,
        description="gRPC message cap, 8 MiB at least",
    )
    log_format: LogFormatName | None = Field(default=None, description="auto: human on a terminal")
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="least"
    )

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """What "auto" stands for, by engine."""

    max_running: int
    token_budget: int


_DEFAULTS: dict[EngineName, EngineDefaults] = {
    # A CPU step of this many tokens takes about as long as people wait gladly.
    "cpu": EngineDefaults(max_running=64, token_budget=512),
    "cuda": EngineDefaults(max_running=256, token_budget=16384),
    "echo": EngineDefaults(max_running=256, token_budget=8192),
}


def load_config(arguments: Sequence[str], environment: Mapping[str, str]) -> WorkerConfig:
    """The settings of this process, "auto" resolved as far as it can be without the model.

    Ends the process: with 0 after --help, with 2 and a line for each wrong setting.
    """
    try:
        config = CliApp.run(WorkerConfig, cli_args=list(arguments))
    except ValidationError as error:
        for line in complaints("tandem worker", WorkerConfig, error):
            print(line, file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    is_overlap_disabled = environment.get(DISABLE_OVERLAP_VARIABLE, "") not in ("", "0", "false")
    return resolve(config, has_cuda=_has_cuda(), is_overlap_disabled=is_overlap_disabled)


def resolve(
    config: WorkerConfig, *, has_cuda: bool = False, is_overlap_disabled: bool = False
) -> WorkerConfig:
    """A new config in which everything is said that needs no model to be known."""
    engine: EngineName = config.engine or ("cuda" if has_cuda else "cpu")
    defaults = _DEFAULTS[engine]
    max_running = config.max_running or defaults.max_running
    return config.model_copy(
        update={
            "engine": engine,
            "max_running": max_running,
            "token_budget": config.token_budget or max(defaults.token_budget, max_running),
            "overlap": config.overlap and not is_overlap_disabled,
        }
    )


def _has_cuda() -> bool:
    """Whether there is an NVIDIA GPU and what it takes to use it; without importing torch."""
    return Path("/dev/nvidia0").exists() and find_spec("flashinfer") is not None
