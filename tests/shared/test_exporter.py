"""The metrics' endpoint: served while the block lasts, gone with it."""

import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from shared.exporter import metrics_exporter
from shared.metrics import GatewayMetrics
from tests.ports import free_port

# Fails as soon as the name of an address is asked for, which DNS may take long to answer.
NAMELESS = """
import sys
from prometheus_client import CollectorRegistry
from shared.exporter import metrics_exporter
from tests.ports import free_port

def refuse(event, _):
    assert event != "socket.gethostbyaddr"

sys.addaudithook(refuse)
with metrics_exporter(CollectorRegistry(), "127.0.0.1", free_port()):
    pass
"""


def scrape(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: bytes = answer.read()
    return text


def test_it_serves_over_http_and_frees_its_port() -> None:
    registry, port = CollectorRegistry(), free_port()
    GatewayMetrics(registry).live_requests.set(7)
    for _ in range(2):
        with metrics_exporter(registry, "127.0.0.1", port) as bound:
            assert bound == port
            assert b"tandem_requests_live 7.0" in scrape(f"http://127.0.0.1:{port}/metrics")


def test_it_logs_no_scrapes(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with metrics_exporter(CollectorRegistry(), "127.0.0.1", port):
        scrape(f"http://127.0.0.1:{port}/metrics")
    assert capfd.readouterr() == ("", "")


def test_it_ends_without_waiting_for_anything() -> None:
    port = free_port()
    with socket.socket() as idle:
        with metrics_exporter(CollectorRegistry(), "127.0.0.1", port):
            # A client that never asks holds nothing up either.
            idle.connect(("127.0.0.1", port))
            scrape(f"http://127.0.0.1:{port}/metrics")
            begin = time.monotonic()
        assert time.monotonic() - begin < 0.25


def test_it_asks_nobody_for_the_machine_s_name() -> None:
    ran = subprocess.run([sys.executable, "-c", NAMELESS], capture_output=True, timeout=30)
    assert ran.returncode == 0, ran.stderr


def test_it_can_listen_on_an_ipv6_address() -> None:
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with metrics_exporter(CollectorRegistry(), "::1", port):
        assert scrape(f"http://[::1]:{port}/metrics") is not None


def test_port_0_means_none() -> None:
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
