"""Prometheus metrics of both services: objects that are passed in, not imported.

Names follow the field's: seconds and ratios, `_total` for counters. Each process has its
own registry, so a test can have as many as it likes. Where several gateway processes share
a port, shared/merged_metrics.py adds them up; a gauge therefore says how that is done, and
is set rather than read at the scrape.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
# Fine up to 15 ms, the bound that coalescing keeps to.
_LAG_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05,
    0.1, 0.25, 1.0, 5.0,
)  # fmt: skip
_ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 4.0)


class LoadSample(Protocol):
    """The engine's numbers, as a worker last heard them."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def pages_cached(self) -> int: ...
    @property
    def pages_held(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def idle_s(self) -> float: ...


class _LoadCollector(Collector):
    """Reads the last load when it is scraped, so that no step pays for it."""

    def __init__(self, read: Callable[[], LoadSample]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        load = self._read()
        pages = max(load.pages_total, 1)
        hit_ratio = load.cached_tokens / max(load.prompt_tokens, 1)
        yield _gauge("tandem_requests_running", "Requests in the running batch.", load.running)
        yield _gauge("tandem_requests_waiting", "Requests in the queue.", load.waiting)
        yield _gauge(
            "tandem_kv_cache_usage_ratio", "KV pages held by requests.", load.pages_held / pages
        )
        yield _gauge(
            "tandem_kv_cache_cached_ratio", "KV pages kept as prefixes.", load.pages_cached / pages
        )
        yield _gauge(
            "tandem_prefix_cache_hit_ratio", "Prompt tokens found in the cache.", hit_ratio
        )
        yield _counter("tandem_steps", "Engine steps.", load.steps)
        yield _counter("tandem_preemptions", "Requests sent back to the queue.", load.preemptions)
        yield _counter("tandem_prompt_tokens", "Prompt tokens admitted.", load.prompt_tokens)
        yield _counter("tandem_cached_tokens", "Those found in the cache.", load.cached_tokens)
        yield _counter("tandem_generation_tokens", "Tokens sampled.", load.generated_tokens)
        yield _counter(
            "tandem_step_gap_seconds", "Device idle while requests were running.", load.idle_s
        )


def register_load(registry: CollectorRegistry, read: Callable[[], LoadSample]) -> None:
    """Adds the engine's numbers, read anew at each scrape and from the exporter's thread."""
    registry.register(_LoadCollector(read))


class WorkerMetrics:
    """What a worker's front counts itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tandem_requests",
            "Accepted requests by how they ended: a finish reason or a status code.",
            ["outcome"],
            registry=registry,
        )
        self.rejections = Counter(
            "tandem_request_rejections",
            "Requests refused at once, by status code.",
            ["code"],
            registry=registry,
        )
        self.engine_losses = Counter(
            "tandem_engine_losses", "Engine processes that died.", registry=registry
        )
        self.unauthenticated_calls = _unauthenticated_calls(registry)
        self.links = Gauge("tandem_links", "Gateways connected.", registry=registry)
        self.queue_time = Histogram(
            "tandem_request_queue_time_seconds",
            "Arrival to the first prefill step.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.prefill_time = Histogram(
            "tandem_request_prefill_time_seconds",
            "First prefill step to the first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.decode_time = Histogram(
            "tandem_request_decode_time_seconds",
            "First token to the last.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )


class GenerationMetrics:
    """What a gateway process counts of each generation when it has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tandem_requests",
            "RPCs by how they ended: a finish reason or a status code.",
            ["method", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "tandem_prompt_tokens", "Prompt tokens submitted.", registry=registry
        )
        self.generation_tokens = Counter(
            "tandem_generation_tokens", "Tokens delivered.", registry=registry
        )
        self.messages = Counter(
            "tandem_stream_messages", "Stream messages sent to clients.", registry=registry
        )
        self.time_to_first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "Arrival at the gateway to the first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "tandem_inter_token_latency_seconds",
            "Mean time between a request's tokens.",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.request_duration = Histogram(
            "tandem_request_duration_seconds",
            "Arrival at the gateway to the end.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.client_requests = Counter(
            "tandem_client_requests",
            "RPCs of a client that a token of ours names, by how they ended.",
            ["client", "outcome"],
            registry=registry,
        )
        self.client_tokens = Counter(
            "tandem_client_generation_tokens",
            "Tokens delivered to a client that a token of ours names.",
            ["client"],
            registry=registry,
        )


class RoutingMetrics:
    """What a gateway process counts of its choices among workers.

    None has a worker's address, for containers that come and go have ever new ones.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "tandem_routing_decisions",
            "Choices of a worker, by what decided.",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            "tandem_request_retries",
            "Requests sent to another worker because one lost or refused them.",
            registry=registry,
        )
        self.breaker_opens = Counter(
            "tandem_circuit_breaker_opens",
            "Times a worker was passed over for a while, after faults in a row.",
            registry=registry,
        )


class GatewayMetrics:
    """What a gateway process counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.generations = GenerationMetrics(registry)
        self.routing = RoutingMetrics(registry)
        self.live_requests = Gauge(
            "tandem_requests_live",
            "Requests being streamed now.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        # Each process has its own links. A client cannot choose its process, so the one
        # that has the fewest workers is what it must be ready for.
        self.workers_ready = Gauge(
            "tandem_workers_ready",
            "Workers that take requests.",
            multiprocess_mode="livemin",
            registry=registry,
        )
        self.worker_losses = Counter(
            "tandem_worker_losses", "Links to a worker that broke.", registry=registry
        )
        self.hop_lag = Histogram(
            "tandem_worker_hop_lag_seconds",
            "Commit of a step in the worker to its arrival here.",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        self.unauthenticated_calls = _unauthenticated_calls(registry)


class SupervisorMetrics:
    """What the parent of several gateway processes counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.processes = Gauge(
            "tandem_gateway_processes", "Gateway processes that run.", registry=registry
        )
        self.process_losses = Counter(
            "tandem_gateway_process_losses",
            "Gateway processes that ended by themselves and were started anew.",
            registry=registry,
        )


def _unauthenticated_calls(registry: CollectorRegistry) -> Counter:
    return Counter(
        "tandem_unauthenticated_calls",
        "Calls refused because they brought no known token.",
        registry=registry,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
