"""The unary calls, health, reflection, metrics, and bytes that are no gRPC."""

import asyncio
import gzip
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import Code
from shared.interceptors import error_from_rpc
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.ports import free_port
from tests.worker.front.conftest import MakeWorker
from tests.worker.front.harness import NOT_SERVING, SERVING, FrontWorker, is_clean
from worker.service import SERVICE_NAME


async def test_the_model_is_described_with_its_limits(make_worker: MakeWorker) -> None:
    async with make_worker(served_model_name="words", page_size=4, overlap=False) as worker:
        model = await worker.stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.architecture, model.device) == ("words", "echo", "cpu")
    assert (model.vocab_size, list(model.eos_token_ids)) == (1000, [2])
    assert (model.max_context_tokens, model.page_size) == (128, 4)
    assert (model.max_running, model.max_waiting, model.default_max_tokens) == (4, 4, 1024)
    assert not model.overlap_scheduling
    assert model.version and model.instance_id and model.tokenizer_sha256


async def test_the_tokenizer_comes_whole_in_chunks_of_at_most_a_megabyte(
    tmp_path: Path, tokenizer_folder: Path, make_worker: MakeWorker
) -> None:
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    template = "{{ messages }}" + " " * (3 << 20)
    (tmp_path / "chat_template.jinja").write_text(template)
    async with make_worker(model=str(tmp_path)) as worker:
        model = await worker.stub.GetModel(pb.GetModelRequest())
        files: dict[str, bytes] = {}
        async for part in worker.stub.GetTokenizer(pb.GetTokenizerRequest()):
            assert len(part.chunk) <= 1 << 20
            assert part.sha256 == model.tokenizer_sha256
            files[part.file_name] = files.get(part.file_name, b"") + part.chunk
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files["chat_template.jinja"].decode() == template
    assert files["tokenizer.json"] == (tokenizer_folder / "tokenizer.json").read_bytes()


async def test_flushing_frees_the_pages_that_prompts_left_cached(worker: FrontWorker) -> None:
    link = worker.link()
    await link.submit(1, range(10, 60))
    await link.outcome(1)
    await worker.wait_load(lambda load: is_clean(load) and load.pages_cached > 0)
    cached = (await worker.load()).pages_cached
    assert (await worker.stub.FlushCache(pb.FlushCacheRequest())).pages_freed == cached
    assert (await worker.stub.FlushCache(pb.FlushCacheRequest())).pages_freed == 0
    await worker.wait_load(lambda load: load.pages_free == load.pages_total)


async def test_a_trace_shows_the_next_steps(worker: FrontWorker) -> None:
    async with asyncio.TaskGroup() as tasks:
        trace = tasks.create_task(one_trace(worker, num_steps=5))
        link = worker.link()
        while not trace.done():
            handle = len(link.heard)
            await link.submit(handle, [10, 11, 12])
            await link.outcome(handle)
    names = [event["name"] for event in trace.result()["traceEvents"]]
    assert names.count("step") == 5
    assert {"plan", "launch", "commit"} <= set(names)


async def one_trace(worker: FrontWorker, *, num_steps: int) -> dict[str, list[dict[str, str]]]:
    answer = await worker.stub.Trace(pb.TraceRequest(num_steps=num_steps))
    trace: dict[str, list[dict[str, str]]] = json.loads(gzip.decompress(answer.trace_json_gz))
    return trace


@pytest.mark.parametrize("num_steps", [0, 10_001])
async def test_a_trace_of_a_senseless_length_is_refused(
    num_steps: int, worker: FrontWorker
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Trace(pb.TraceRequest(num_steps=num_steps))
    error = error_from_rpc(caught.value)
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "num_steps")


async def test_an_abort_of_too_many_ids_is_refused(make_worker: MakeWorker) -> None:
    async with make_worker() as worker:
        ids = [str(number) for number in range(1025)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.stub.Abort(pb.AbortRequest(request_ids=ids))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await worker.stub.Abort(pb.AbortRequest(request_ids=ids[1:])) == pb.AbortResponse()


async def test_the_drain_call_refuses_new_requests_and_counts_the_live_ones(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=20) as worker:
        link = worker.link()
        await link.submit(1, range(10, 40))
        await link.until(lambda: link[1].started == 1)
        assert (await worker.stub.Drain(pb.DrainRequest())).live_requests == 1
        await worker.wait_health(NOT_SERVING, SERVICE_NAME)
        await link.submit(2)
        assert (await link.outcome(2)).failure.code == Code.UNAVAILABLE
        assert (await link.outcome(1)).token_ids == list(range(10, 40))
        assert (await worker.stub.Drain(pb.DrainRequest())).live_requests == 0


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_a_health_watch_sees_serving_and_then_not_serving(
    service: str, make_worker: MakeWorker
) -> None:
    async with make_worker() as worker:
        watch = worker.health.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watch.read()).status == SERVING
        await worker.stub.Drain(pb.DrainRequest())
        assert (await watch.read()).status == NOT_SERVING
        check = await worker.health.Check(health_pb2.HealthCheckRequest(service=service))
        assert check.status == NOT_SERVING
        watch.cancel()


async def test_reflection_names_the_services(worker: FrontWorker) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    call.cancel()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff" * 9],
)
async def test_bytes_that_are_no_grpc_do_no_harm(garbage: bytes, worker: FrontWorker) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(garbage)
    await writer.drain()
    await worker.assert_next_works()
    writer.close()
    await writer.wait_closed()


async def test_a_message_that_does_not_parse_ends_its_stream_alone(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        good = worker.link()
        await good.submit(1, [10, 11, 12])
        raw: Any = worker.channel.stream_stream(f"/{SERVICE_NAME}/Run")()
        await raw.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in raw:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await good.outcome(1)).token_ids == [10, 11, 12]


async def test_a_message_above_the_cap_is_refused_and_the_next_works(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(max_message_bytes=8 << 20) as worker:
        link = worker.link()
        await link.submit(1, request_id="x" * (8 << 20))
        assert await link.ending() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await worker.assert_next_works()


async def test_metrics_tell_what_ran_and_what_was_refused(make_worker: MakeWorker) -> None:
    port = free_port()
    async with make_worker(metrics_port=port) as worker:
        link = worker.link()
        await link.submit(1, [10, 11, 12])
        await link.outcome(1)
        await link.submit(2, [])
        await link.outcome(2)
        await worker.wait_load(lambda load: load.generated_tokens >= 4)
        text = await asyncio.to_thread(scrape, port)
    assert 'tandem_requests_total{outcome="EOS"} 1.0' in text
    assert 'tandem_request_rejections_total{code="INVALID_ARGUMENT"} 1.0' in text
    assert "tandem_generation_tokens_total 4.0" in text
    assert "tandem_requests_running 0.0" in text
    assert "tandem_links 1.0" in text


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())
