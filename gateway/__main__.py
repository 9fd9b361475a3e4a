"""Entry point: `python -m gateway`."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import structlog

from gateway.config import EXIT_CANNOT_LISTEN, GatewayConfig, load_config, resolved_processes
from gateway.supervisor import supervise
from shared.cores import usable_cores
from shared.logs import LogFormat, configure_logging


class _Process(Protocol):
    def run(self, config: GatewayConfig) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a gateway until it is told to stop. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    config = load_config(arguments)
    configure_logging("gateway", LogFormat(config.log_format), level=config.log_level)
    num_processes = resolved_processes(config.processes, usable_cores())
    structlog.get_logger(__name__).info("settings", processes=num_processes)
    if num_processes == 1:
        # Only here: a parent of several processes has no use for gRPC and its threads.
        return cast(_Process, importlib.import_module("gateway.process")).run(config)
    try:
        return supervise(config, num_processes, arguments, os.environ)
    except OSError as error:
        print(f"tandem gateway: {error}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN


if __name__ == "__main__":
    sys.exit(main())
