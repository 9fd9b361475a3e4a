"""Structured logs, set up once by each process's main."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import structlog

_GRPC = "grpc._cython.cygrpc"


class LogFormat(StrEnum):
    """How a log line looks; AUTO is HUMAN on a terminal and JSON elsewhere."""

    AUTO = "auto"
    HUMAN = "human"
    JSON = "json"


def configure_logging(
    service: str, log_format: LogFormat = LogFormat.AUTO, *, level: str = "info"
) -> None:
    """Sends structlog's and the standard library's records to stderr, one line each."""
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*processors, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=processors, processors=_renderers(log_format)
        )
    )
    logging.getLogger(_GRPC).addFilter(_tells_no_metadata)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.contextvars.bind_contextvars(service=service)


@contextmanager
def request_logging(request_id: str) -> Iterator[None]:
    """Adds the request's id to every line logged inside, in this task and its children."""
    with structlog.contextvars.bound_contextvars(request_id=request_id):
        yield


def _tells_no_metadata(record: logging.LogRecord) -> bool:
    """Keeps back gRPC's complaint of metadata that is no UTF-8: it quotes what may be a token."""
    return not str(record.msg).startswith("Invalid encoding")


def _renderers(log_format: LogFormat) -> list[structlog.typing.Processor]:
    is_human = log_format is LogFormat.HUMAN or (
        log_format is LogFormat.AUTO and sys.stderr.isatty()
    )
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if is_human:
        console = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # Rich's tracebacks, taken where rich is installed, show every local: clients' prompts.
            exception_formatter=structlog.dev.plain_traceback,
        )
        return [strip, console]
    return [strip, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
