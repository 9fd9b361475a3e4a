"""What the gateway counts can be read from its metrics port."""

import asyncio
import socket
import urllib.request

import grpc

from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_requests_tokens_and_latencies_are_counted(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    port = free_port()
    async with make_worker() as worker, start_gateway(worker, metrics_port=port) as gateway:
        answer = await gateway.collect(text("one two"))
        refused = gateway.stream(text("x", max_tokens=0))
        assert await refused.code() == grpc.StatusCode.INVALID_ARGUMENT
        await gateway.until_idle()
        metrics = await asyncio.to_thread(read, port)
    ok = 'tandem_requests_total{method="GenerateStream",outcome="EOS"}'
    bad = 'tandem_requests_total{method="GenerateStream",outcome="INVALID_ARGUMENT"}'
    assert (metrics[ok], metrics[bad]) == (1, 1)
    assert metrics["tandem_generation_tokens_total"] == len(answer.token_ids)
    assert metrics["tandem_prompt_tokens_total"] == answer.started.prompt_tokens
    assert metrics["tandem_time_to_first_token_seconds_count"] == 1
    assert metrics["tandem_workers_ready"] == 1
    assert metrics["tandem_requests_live"] == 0
