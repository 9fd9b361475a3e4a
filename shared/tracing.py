"""Spans of requests, for whoever collects them: what the services see of OpenTelemetry.

Nothing of it is imported unless the environment asks for traces. Spans are made when a
request ends, from the times that are kept anyhow; a token costs nothing.
"""

import importlib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Protocol, cast

import structlog

_log = structlog.get_logger(__name__)

Attributes = Mapping[str, str | int | float | bool]

# W3C Trace Context, version 00: version, trace id, parent id, flags.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# Any of them says where spans are to go.
_DESTINATIONS = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


class Span(Protocol):
    """One piece of work, from its start to `end`. Times are time.monotonic()'s."""

    @property
    def traceparent(self) -> str:
        """What makes the work of others a part of this."""
        ...

    def add_event(self, name: str, at: float) -> None: ...

    def add_child(self, name: str, started_at: float, ended_at: float) -> None:
        """A part of the work that is over."""
        ...

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        """`error` is the status it failed with by a fault of ours; empty: it did not."""
        ...


class Tracer(Protocol):
    """Makes spans and sends them off, on a thread of its own."""

    def start(self, name: str, *, parent: str, started_at: float) -> Span:
        """A span that is part of the work that the traceparent `parent` names, if any."""
        ...

    def close(self) -> None:
        """Sends what is left, for a few seconds at most. Blocks."""
        ...


class _OtelModule(Protocol):
    def tracer_from_environment(self, service: str, environment: Mapping[str, str]) -> Tracer: ...


def open_tracer(service: str, environment: Mapping[str, str]) -> Tracer | None:
    """None unless OpenTelemetry's own variables ask for traces and the extra is installed.

    Raises SettingsError for an exporter that cannot be had.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    wanted = [environment.get(name, "") for name in _DESTINATIONS]
    if not any(wanted) or wanted[0] == "none":
        return None
    # The SDK, for the API alone comes along with other packages.
    if not _is_installed("opentelemetry.sdk"):
        _log.warning("no traces: install them with pip install 'tandem[otel]'")
        return None
    otel = cast(_OtelModule, importlib.import_module("shared.otel"))
    return otel.tracer_from_environment(service, environment)


def checked_traceparent(value: str) -> str:
    """The value if it is a traceparent, else nothing: a caller can send anything."""
    return value if _TRACEPARENT.fullmatch(value) else ""


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
