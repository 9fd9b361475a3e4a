"""Entry point: `python -m gateway`."""

import asyncio
import sys
from collections.abc import Sequence

import uvloop

from gateway.config import GatewayConfig, load_config
from gateway.server import serve
from shared.logs import LogFormat, configure_logging

# As a worker that cannot listen.
EXIT_CANNOT_LISTEN = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a gateway until it is told to stop. Returns the exit code."""
    return run(load_config(sys.argv[1:] if arguments is None else arguments))


def run(config: GatewayConfig) -> int:
    """The same with settings at hand."""
    configure_logging("gateway", LogFormat(config.log_format), level=config.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except OSError as error:
        print(f"tandem gateway: {error}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
