"""Metrics are read when they are scraped, from a registry of one's own."""

import socket
import urllib.request
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from shared.metrics import GatewayMetrics, WorkerMetrics, metrics_exporter, register_load


@dataclass
class Load:
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    idle_s: float = 0.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_the_load_is_read_anew_at_each_scrape() -> None:
    registry, load = CollectorRegistry(), Load()
    register_load(registry, lambda: load)
    assert b"tandem_kv_cache_usage_ratio 0.0" in generate_latest(registry)
    load.pages_total, load.pages_held, load.prompt_tokens, load.cached_tokens = 10, 4, 8, 2
    text = generate_latest(registry)
    assert b"tandem_kv_cache_usage_ratio 0.4" in text
    assert b"tandem_prefix_cache_hit_ratio 0.25" in text
    assert b"tandem_prompt_tokens_total 8.0" in text


def test_two_services_of_a_kind_do_not_share_their_counts() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(first).requests.labels("EOS").inc()
    WorkerMetrics(second)
    assert b'tandem_requests_total{outcome="EOS"} 1.0' in generate_latest(first)
    assert b"EOS" not in generate_latest(second)


def test_the_exporter_serves_over_http_and_frees_its_port() -> None:
    registry, port = CollectorRegistry(), free_port()
    GatewayMetrics(registry).live_requests.set(7)
    for _ in range(2):
        with metrics_exporter(registry, "127.0.0.1", port) as bound:
            assert bound == port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                assert b"tandem_requests_live 7.0" in answer.read()


def test_port_0_means_no_exporter() -> None:
    with metrics_exporter(CollectorRegistry(), "127.0.0.1", 0) as bound:
        assert bound == 0


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(OSError, match="in use"),
            metrics_exporter(CollectorRegistry(), "127.0.0.1", taken.getsockname()[1]),
        ):
            pass
