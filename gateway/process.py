"""One process that serves: the only one, or one of several on a port that they share.

`python -m gateway.process PARENT_PID SLOT ADDRESS FLAG...` is what the supervisor starts.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial

import structlog

from gateway.config import EXIT_CANNOT_LISTEN, GatewayConfig, load_config
from gateway.server import serve
from gateway.supervisor import ABLE, ALIVE, SIGN_INTERVAL_S
from shared.errors import SettingsError
from shared.event_loop import new_event_loop
from shared.logs import LogFormat, configure_logging
from shared.merged_metrics import FOLDER_VARIABLE, count_in_files
from shared.parent import die_with_parent
from shared.tasks import TaskSet
from shared.tracing import Tracer, open_tracer


def run(config: GatewayConfig, line: socket.socket | None = None) -> int:
    """Serves until told to stop. Returns the exit code.

    `line` leads to the parent, where this is one of several processes.
    """
    tracer = None
    try:
        tracer = open_tracer("tandem-gateway", os.environ)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(
                serve(config, tracer=tracer)
                if line is None
                else _serve_in_turn(config, line, tracer)
            )
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
        return run(ours, line)


async def _serve_in_turn(config: GatewayConfig, line: socket.socket, tracer: Tracer | None) -> None:
    line.setblocking(False)
    async with TaskSet() as tasks:
        tasks.start(_show_life(line), name="signs of life")
        await serve(config, turn=partial(_turn, line), tracer=tracer)


async def _show_life(line: socket.socket) -> None:
    while True:
        # A parent that does not read for a day misses nothing.
        with suppress(OSError):
            line.send(ALIVE)
        await asyncio.sleep(SIGN_INTERVAL_S)


async def _turn(line: socket.socket, first: Awaitable[None]) -> None:
    """Says to the parent that this process could serve, and returns when it may listen."""
    loop = asyncio.get_running_loop()
    await first
    await loop.sock_sendall(line, ABLE)
    await loop.sock_recv(line, 1)


if __name__ == "__main__":
    sys.exit(main())
