"""Spans by OpenTelemetry's SDK. Imported by `shared.tracing` alone, and only when asked for."""

import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import cast

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.errors import SettingsError
from shared.tracing import Attributes
from shared.version import tandem_version

# A collector that does not answer must not hold up the end of a process.
_CLOSE_TIMEOUT_S = 3.0
_OTLP_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class OtelSpan:
    """`shared.tracing.Span`."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        context = trace.set_span_in_context(self._span)
        TraceContextTextMapPropagator().inject(carrier, context)
        return carrier.get("traceparent", "")

    def add_event(self, name: str, at: float) -> None:
        self._span.add_event(name, timestamp=_unix_ns(at))

    def add_child(self, name: str, started_at: float, ended_at: float) -> None:
        if self._span.is_recording():
            context = trace.set_span_in_context(self._span)
            child = self._tracer.start_span(name, context, start_time=_unix_ns(started_at))
            child.end(_unix_ns(ended_at))

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_unix_ns(at))


class OtelTracer:
    """`shared.tracing.Tracer`, over a provider that it owns."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem", tandem_version())

    def start(self, name: str, *, parent: str, started_at: float) -> OtelSpan:
        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
        span = self._tracer.start_span(
            name, context, kind=SpanKind.SERVER, start_time=_unix_ns(started_at)
        )
        return OtelSpan(self._tracer, span)

    def close(self) -> None:
        # On a thread that may be left behind: exporters try again for longer than we wait.
        closing = threading.Thread(target=self._provider.shutdown, name="close otel", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


def tracer_from_environment(service: str, environment: Mapping[str, str]) -> OtelTracer:
    """By the standard OTEL_* variables, which the SDK reads as well: sampler, limits, headers.

    Raises SettingsError for an exporter that is not installed.
    """
    is_named = "OTEL_SERVICE_NAME" in environment or (
        SERVICE_NAME in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    )
    resource = Resource.create({} if is_named else {SERVICE_NAME: service})
    # Not at exit, when nobody can bound it any more: `close` does it.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        exporter = _exporter(name.strip(), environment)
        provider.add_span_processor(BatchSpanProcessor(exporter()))
    return OtelTracer(provider)


def _exporter(name: str, environment: Mapping[str, str]) -> Callable[[], SpanExporter]:
    if name == "otlp":
        protocol = (
            environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
            or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or "http/protobuf"
        )
        name = _OTLP_EXPORTERS.get(protocol, protocol)
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise SettingsError(f"OTEL_TRACES_EXPORTER: no exporter {name} is installed")
    return cast(Callable[[], SpanExporter], found[0].load())


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - round(1e9 * (time.monotonic() - monotonic_s))
