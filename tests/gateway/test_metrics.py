"""What the gateway counts can be read from its metrics port."""

import asyncio
import urllib.request

import grpc

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect, collect_all
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuietTwo
from tests.ports import free_port


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


async def test_what_decided_on_a_worker_is_counted(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    port = free_port()
    prompt = "one two three four five six seven eight nine ten " * 5
    async with (
        make_worker() as one,
        make_worker() as other,
        start_gateway(one, other, metrics_port=port) as gateway,
    ):
        for request in (prompt, prompt, prompt, "short"):
            await gateway.collect(text(request))
        twice = text(prompt, n=2, sampling=pb.SamplingParams(temperature=1))
        await collect_all(gateway.stream(twice))
        await one.crash()
        await gateway.until_ready(1)
        await collect_all(gateway.stream(twice))
        metrics = await asyncio.to_thread(read, port)
    name = 'tandem_routing_decisions_total{{reason="{}"}}'
    counted = {
        reason: metrics[name.format(reason)] for reason in ("hash", "prefix", "load", "only")
    }
    # The second completion of a request follows the first, which decides if there is a choice.
    assert counted == {"hash": 1, "prefix": 4, "load": 1, "only": 2}
    assert metrics["tandem_request_retries_total"] == 0


async def test_retries_and_workers_that_became_suspect_are_counted(
    quiet_two: StartQuietTwo,
) -> None:
    port = free_port()
    async with quiet_two(metrics_port=port, breaker_threshold=1) as two:
        call, first, second = await two.stream()
        await first.crash()
        (await second.request()).finish()
        await collect(call)
        await two.gateway.until_ready(1)
        metrics = await asyncio.to_thread(read, port)
    assert metrics["tandem_request_retries_total"] == 1
    assert metrics["tandem_circuit_breaker_opens_total"] == 1
