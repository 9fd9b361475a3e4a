"""`python -m worker`: reads the settings, spawns the engine process, serves."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

import structlog
import uvloop

from shared.errors import SettingsError
from shared.logs import LogFormat, configure_logging
from shared.shutdown import shutdown_event
from shared.tracing import Tracer, open_tracer
from worker.config import EXIT_BAD_CONFIGURATION, WorkerConfig, load_config
from worker.engine_main import run_engine
from worker.engine_process import EngineProcess, EngineStartError
from worker.server import ListenError, serve

EXIT_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after a clean drain, 2 on a bad configuration, 1 when the engine cannot be kept up."""
    # Until the loop hears it, SIGINT ends us as SIGTERM does: after a KeyboardInterrupt,
    # multiprocessing would wait for an engine that nobody has told to leave.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config = load_config(sys.argv[1:] if arguments is None else arguments, os.environ)
    configure_logging("worker", LogFormat(config.log_format or "auto"), level=config.log_level)
    structlog.get_logger(__name__).info("settings", **config.model_dump())
    spawn = partial(EngineProcess, run_engine, (config, os.getpid()))
    # Before any gRPC object exists: a server's threads and descriptors do not survive in a
    # child, and the loop is one for each process.
    first = spawn()
    tracer = None
    try:
        tracer = open_tracer("tandem-worker", os.environ)
        uvloop.run(_run(config, first, spawn, tracer))
    except (ListenError, SettingsError) as error:
        print(f"tandem worker: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except EngineStartError as error:
        print(f"tandem worker: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION if error.is_configuration else EXIT_FAILED
    finally:
        # Whatever went wrong: at exit, multiprocessing waits for children.
        first.end()
        if tracer is not None:
            tracer.close()
    return 0


async def _run(
    config: WorkerConfig,
    first: EngineProcess,
    spawn: Callable[[], EngineProcess],
    tracer: Tracer | None,
) -> None:
    with shutdown_event() as stop:
        await serve(config, first, spawn, stop, tracer=tracer)


if __name__ == "__main__":
    sys.exit(main())
