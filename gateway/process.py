"""One process that serves: the only one, or one of several on a port that they share.

`python -m gateway.process PARENT_PID SLOT ADDRESS FLAG...` is what the supervisor starts.
"""

import asyncio
import os
import socket
import sys
from functools import partial

import structlog

from gateway.config import EXIT_CANNOT_LISTEN, GatewayConfig, load_config
from gateway.server import Turn, serve
from gateway.supervisor import ABLE
from shared.errors import SettingsError
from shared.event_loop import new_event_loop
from shared.logs import LogFormat, configure_logging
from shared.merged_metrics import FOLDER_VARIABLE, count_in_files
from shared.parent import die_with_parent
from shared.tracing import open_tracer


def run(config: GatewayConfig, turn: Turn | None = None) -> int:
    """Serves until told to stop. Returns the exit code."""
    tracer = None
    try:
        tracer = open_tracer("tandem-gateway", os.environ)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(config, turn=turn, tracer=tracer))
    except (OSError, SettingsError) as error:
        print(f"tandem gateway: {error}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN
    finally:
        if tracer is not None:
            tracer.close()
    return 0


def main() -> int:
    """Runs in a slot of its parent's, with the settings that its parent has."""
    parent_pid, slot, address, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    config = load_config(arguments)
    configure_logging("gateway", LogFormat(config.log_format), level=config.log_level)
    structlog.contextvars.bind_contextvars(process=int(slot))
    if FOLDER_VARIABLE in os.environ:
        count_in_files(int(slot))
    # The parent has the port, with its number, and serves the metrics.
    ours = config.model_copy(update={"listen": address, "metrics_port": 0})
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as line:
        return run(ours, partial(_turn, line))


async def _turn(line: socket.socket) -> None:
    """Says to the parent that this process could serve, and returns when it may listen."""
    loop = asyncio.get_running_loop()
    line.setblocking(False)
    await loop.sock_sendall(line, ABLE)
    await loop.sock_recv(line, 1)


if __name__ == "__main__":
    sys.exit(main())
