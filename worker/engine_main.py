"""The engine process: opens the model, then runs the loop that owns scheduler and engine.

Its parent tells it to stop; it ignores the terminal's signals, and dies with its parent.
"""

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import structlog

from shared.errors import ServingError
from shared.logs import LogFormat, configure_logging
from shared.parent import die_with_parent
from worker.config import EXIT_BAD_CONFIGURATION, WorkerConfig
from worker.engine.factory import OpenedEngine, open_engine
from worker.engine_loop import EngineLoop
from worker.messages import Event, Fatal, Progress, Ready
from worker.pipe import EnginePipe
from worker.scheduler.config import Policy, SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.structured.outputs import StructuredOutputs
from worker.wakeable_channel import WakeableChannel

_EXIT_LOST = 1
# For what the front has not taken yet.
_LAST_WORDS_S = 2.0

_log = structlog.get_logger(__name__)


def run_engine(config: WorkerConfig, parent_pid: int, connection: Connection) -> None:
    """What the front spawns. Exits with 0 after Stop or when the front is gone.

    Exits with EXIT_BAD_CONFIGURATION when the model cannot be served as asked, and with 1
    after any other fault; a Fatal event has said which.
    """
    # Elsewhere than on Linux the end of the pipe does it, a step later.
    die_with_parent(parent_pid)
    # The front, which a hang-up tells to read its tokens, may go on after one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    configure_logging("engine", LogFormat(config.log_format or "auto"), level=config.log_level)
    channel = _Channel(connection)
    try:
        code = _serve(config, connection, channel)
    finally:
        channel.close()
    sys.exit(code)


def _serve(config: WorkerConfig, connection: Connection, channel: "_Channel") -> int:
    """Until the end. Returns the exit code."""
    try:
        opened, scheduler = _open(config, lambda message: channel.emit(Progress(message)))
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except (ServingError, ValueError) as error:
        channel.last_words(str(error))
        return EXIT_BAD_CONFIGURATION
    except Exception as error:
        _log.exception("the model could not be opened")
        channel.last_words(f"the model could not be opened: {type(error).__name__}: {error}")
        return _EXIT_LOST
    try:
        channel.emit(Ready(opened.model, opened.engine.info, opened.tokenizer))
        # What loading made lives for ever: with torch and transformers imported, looking at
        # it again takes a full collection 50 ms, in the middle of some step.
        gc.collect()
        gc.freeze()
        _run_loop(config, opened, scheduler, connection, channel.emit)
    finally:
        opened.engine.close()
    return _EXIT_LOST if channel.is_fatal else 0


def _run_loop(
    config: WorkerConfig,
    opened: OpenedEngine,
    scheduler: Scheduler,
    connection: Connection,
    emit: Callable[[Event], None],
) -> None:
    with ExitStack() as stack:
        commands = stack.enter_context(closing(WakeableChannel(connection)))
        structures = None
        if opened.grammars is not None:
            structures = StructuredOutputs(
                opened.grammars,
                cache_entries=config.structure_cache,
                timeout_s=config.structure_timeout_s,
                max_rows=opened.engine.info.max_rows,
                wake=commands.wake,
                # A flood of new rules leaves most of the queue to other requests.
                most_waiting=max(1, config.max_waiting // 4),
            )
            stack.callback(structures.close)
        EngineLoop(
            scheduler,
            opened.engine,
            commands,
            emit,
            overlap=config.overlap,
            structures=structures,
        ).run()


class _Channel:
    """Events to the front, with a note of whether one of them was the last."""

    def __init__(self, connection: Connection) -> None:
        self._pipe = EnginePipe(connection)
        self.is_fatal = False

    def emit(self, event: Event) -> None:
        """Raises OSError when the front is gone."""
        self.is_fatal = self.is_fatal or isinstance(event, Fatal)
        self._pipe.send(event)

    def last_words(self, message: str) -> None:
        try:
            self.emit(Fatal(message))
        except OSError:
            _log.error("nobody is left to hear it", message=message)

    def close(self) -> None:
        self._pipe.close(_LAST_WORDS_S)


def scheduler_config(config: WorkerConfig, max_rows: int) -> SchedulerConfig:
    """The scheduler's part of the settings; the engine's rows bound what can run."""
    assert config.token_budget is not None and config.max_running is not None
    return SchedulerConfig(
        token_budget=config.token_budget,
        max_running=min(config.max_running, max_rows),
        max_waiting=config.max_waiting,
        policy=Policy.MIXED if config.policy == "mixed" else Policy.PREFILL_FIRST,
        prefix_caching=config.prefix_caching,
    )


def _open(config: WorkerConfig, progress: Callable[[str], None]) -> tuple[OpenedEngine, Scheduler]:
    opened = open_engine(config, os.environ, progress)
    info = opened.engine.info
    try:
        scheduler = Scheduler(
            scheduler_config(config, info.max_rows), info, opened.model.eos_token_ids
        )
    except BaseException:
        opened.engine.close()
        raise
    return opened, scheduler
