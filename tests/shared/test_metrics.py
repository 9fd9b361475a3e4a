"""Metrics are read when they are scraped, from a registry of one's own."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from shared.metrics import WorkerMetrics, register_load


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
