"""One load at several concurrencies: ghz's whole calls, and our own clients' tokens beside them."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.cli.bench_client import ClientTask, Result
from gateway.cli.bench_pool import ClientPool
from shared.workload import WorkloadRequest
from tests.load.ghz import GhzRun, run_ghz

# As the prompt of the sweep's ghz configuration.
_PROMPT_LEN = 18
_CONNECT_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 60.0
_PARSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What our own clients saw, in milliseconds; NaN where there was nothing to see."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    failures: Sequence[str]


@dataclass(frozen=True, slots=True)
class Level:
    """One concurrency."""

    concurrency: int
    # Every call has exactly as many.
    tokens_per_call: int
    ghz: GhzRun
    clients: ClientRun

    @property
    def ghz_tokens_per_s(self) -> float:
        return self.ghz.calls_per_s * self.tokens_per_call


async def run_level(
    ghz: Path,
    config: dict[str, Any],
    address: str,
    folder: Path,
    *,
    concurrency: int,
    requests_each: int,
) -> Level:
    """Raises GhzError and BenchError."""
    # One connection for eight streams, as clients with pools have them.
    connections = max(1, concurrency // 8)
    told = {**config, "concurrency": concurrency, "connections": connections}
    whole_calls = await run_ghz(ghz, told, address, folder)
    task = _task(
        address,
        concurrency=concurrency,
        connections=connections,
        requests_each=requests_each,
        max_tokens=config["data"]["max_tokens"],
    )
    async with ClientPool([task]) as pool:
        await pool.wait_ready(_CONNECT_TIMEOUT_S)
        pool.go()
        await pool.wait_done(_CALL_TIMEOUT_S * requests_each + _PARSE_TIMEOUT_S)
        (result,) = pool.results
    named = replace(whole_calls, name=f"sweep, {concurrency}")
    return Level(concurrency, config["data"]["max_tokens"], named, _figures(result))


def _task(
    address: str, *, concurrency: int, connections: int, requests_each: int, max_tokens: int
) -> ClientTask:
    clients = [
        [
            WorkloadRequest(
                [1000 + (client * requests_each + number) % 20_000] * _PROMPT_LEN,
                max_tokens,
                temperature=1.0,
                seed=client * requests_each + number,
            )
            for number in range(requests_each)
        ]
        for client in range(concurrency)
    ]
    return ClientTask(
        address=address,
        token="",
        tls=None,
        clients=clients,
        num_connections=connections,
        timeout_s=_CALL_TIMEOUT_S * requests_each,
        cache_salt=uuid.uuid4().hex,
    )


def _figures(result: Result) -> ClientRun:
    return ClientRun(
        tokens_per_s=result.num_tokens / (result.end - result.begin),
        ttft_p50_ms=_percentile_ms(result.ttft_s, 50),
        ttft_p99_ms=_percentile_ms(result.ttft_s, 99),
        itl_p50_ms=_percentile_ms(result.itl_s, 50),
        itl_p99_ms=_percentile_ms(result.itl_s, 99),
        failures=result.failures,
    )


def _percentile_ms(values: NDArray[np.float64], percent: float) -> float:
    return 1e3 * float(np.percentile(values, percent)) if len(values) else float("nan")
