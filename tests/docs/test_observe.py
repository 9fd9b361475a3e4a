"""docker-compose.yml and what its profile `observe` provisions, against the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from gateway.config import GatewayConfig
from shared.errors import Code
from shared.metrics import GatewayMetrics, SupervisorMetrics, WorkerMetrics, register_load
from shared.types import FinishReason
from tests.docs.settings_table import README
from worker.config import WorkerConfig
from worker.messages import Load

ROOT = README.parent
OBSERVE = ROOT / "docs/observe"
DASHBOARD = OBSERVE / "grafana/dashboards/tandem.json"
# What each kind of metric is at the scrape.
SUFFIXES = {
    "counter": ("_total", "_created"),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum", "_created"),
}


def load_yaml(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load_yaml(ROOT / "docker-compose.yml")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return content


def metric_names(registry: CollectorRegistry) -> set[str]:
    return {
        metric.name + suffix for metric in registry.collect() for suffix in SUFFIXES[metric.type]
    }


def served_metrics() -> dict[str, set[str]]:
    """By scrape job, which is a service's name: what its endpoint has."""
    gateway, worker = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics(gateway)
    SupervisorMetrics(gateway)
    WorkerMetrics(worker)
    register_load(worker, Load)
    return {"gateway": metric_names(gateway), "worker": metric_names(worker)}


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries_of(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            yield target["expr"]


def test_every_query_asks_a_service_for_a_metric_that_it_has(dashboard: dict[str, Any]) -> None:
    served = served_metrics()
    found = 0
    for query in queries_of(dashboard):
        # Each name with the job beside it, as both services have some names in common.
        asked = re.findall(r'(tandem_\w+)\{job="(\w+)"', query)
        assert len(asked) == len(re.findall(r"tandem_\w+", query)) > 0, query
        for name, job in asked:
            assert name in served[job], f"{job} has no {name}: {query}"
        found += len(asked)
    assert found > 30


@pytest.mark.parametrize("document", ["observability.md", "security.md"])
def test_every_metric_that_a_document_names_is_there(document: str) -> None:
    served = served_metrics()
    known = served["gateway"] | served["worker"]
    # A histogram goes by its own name.
    known |= {name.removesuffix("_bucket") for name in known}
    named = re.findall(r"`(tandem_\w+)`", (ROOT / "docs" / document).read_text())
    assert named and set(named) <= known


def test_every_status_and_finish_reason_of_a_query_is_one(dashboard: dict[str, Any]) -> None:
    known = {code.name for code in Code} | {reason.name for reason in FinishReason}
    for query in queries_of(dashboard):
        for names in re.findall(r'outcome[=!]~"([^"]*)"', query):
            assert set(names.split("|")) <= known, query
        # None is left out: whatever is no finish reason is an error.
        for names in re.findall(r'outcome!~"([^"]*)"', query):
            assert set(names.split("|")) == {reason.name for reason in FinishReason}


@pytest.mark.parametrize(
    "what",
    [
        "Time to first token",
        "Inter-token latency",
        "Running and waiting",
        "Queue and prefill",
        "KV cache",
        "Prefix cache hits",
        "Device idle",
        "Tokens",
        "Errors by code",
        "Hop lag",
    ],
)
def test_the_dashboard_shows(dashboard: dict[str, Any], what: str) -> None:
    assert what in [panel["title"] for panel in panels_of(dashboard)]


def test_panels_have_places_and_ids_of_their_own(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_dashboard_asks_the_data_source_that_is_provisioned(
    dashboard: dict[str, Any],
) -> None:
    [source] = load_yaml(OBSERVE / "grafana/datasources/prometheus.yml")["datasources"]
    asked = {target["datasource"]["uid"] for p in panels_of(dashboard) for target in p["targets"]}
    assert asked == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_reads_the_ports_that_the_services_open(compose: dict[str, Any]) -> None:
    jobs = load_yaml(OBSERVE / "prometheus.yml")["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"gateway", "worker"}
    for job in jobs:
        [discovery] = job["dns_sd_configs"]
        [service] = discovery["names"]
        assert service == job["job_name"]
        environment = compose["services"][service]["environment"]
        prefix = f"TANDEM_{service.upper()}_METRICS"
        assert environment[f"{prefix}_PORT"] == str(discovery["port"])
        assert environment[f"{prefix}_HOST"] == "0.0.0.0"
        assert str(discovery["port"]) in compose["services"][service]["expose"]


def test_every_file_that_a_container_gets_is_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), volume
                assert volume.endswith(":ro"), volume
            else:
                assert source in compose["volumes"], volume


def test_images_of_others_are_pinned_and_run_in_the_profile_alone(
    compose: dict[str, Any],
) -> None:
    others = {name: s for name, s in compose["services"].items() if "build" not in s}
    assert set(others) == {"prometheus", "grafana"}
    for service in others.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert service["profiles"] == ["observe"]


def test_ports_are_on_loopback_unless_a_setting_says_otherwise(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            allowed = ("127.0.0.1:", "${TANDEM_BIND:-127.0.0.1}:" if name == "gateway" else "-")
            assert port.startswith(allowed), port


def test_no_secret_is_written_into_the_file(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"TOKEN|PASSWORD|KEY", name):
                assert re.fullmatch(r"\$\{\w+:-(admin)?\}", value), name


def test_every_setting_in_the_file_is_one_of_the_services(compose: dict[str, Any]) -> None:
    configs: dict[str, type[BaseSettings]] = {"gateway": GatewayConfig, "worker": WorkerConfig}
    for service, config in configs.items():
        prefix = f"TANDEM_{service.upper()}_"
        for name in compose["services"][service]["environment"]:
            if name.startswith(prefix):
                assert name.removeprefix(prefix).lower() in config.model_fields, name
