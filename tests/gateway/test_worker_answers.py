"""What a worker answers, or that there is none, reaches the client as its status."""

from collections.abc import Callable

import grpc
import pytest

from gateway.config import GatewayConfig
from gateway.server import running_gateway
from shared.errors import Code
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect, retry_delay_s
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import StartGateway
from tests.gateway.fake_worker import FakeWorker

Status = grpc.StatusCode
MakeWorker = Callable[..., FakeWorker]


async def test_a_live_id_is_refused_and_the_first_is_unharmed(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        first = gateway.stream(text("x", request_id="same"))
        request = await worker.request()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.collect(text("x", request_id="same"))
        assert caught.value.code() == Status.ALREADY_EXISTS
        request.start()
        request.send_tokens([100])
        request.finish()
        assert (await collect(first)).token_ids == [100]
        again = gateway.stream(text("x", request_id="same"))
        (await worker.request(1)).finish()
        await collect(again)


async def test_more_live_requests_than_allowed_are_refused_at_once(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker, max_live_requests=1) as gateway,
    ):
        first = gateway.stream(text("x"))
        request = await worker.request()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.collect(text("x"))
        assert caught.value.code() == Status.RESOURCE_EXHAUSTED
        assert retry_delay_s(caught.value) > 0
        request.finish()
        await collect(first)


async def test_a_full_worker_says_when_to_come_again(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("x"))
        (await worker.request()).reject(Code.RESOURCE_EXHAUSTED, "queue full", retry_after_ms=1500)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() == Status.RESOURCE_EXHAUSTED
        assert retry_delay_s(caught.value) == 1.5


async def test_a_fault_of_the_engine_is_internal(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("x"))
        request = await worker.request()
        request.start()
        request.send_tokens([100])
        request.fail(Code.INTERNAL, "logits were not finite")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() == Status.INTERNAL
        assert "not finite" in (caught.value.details() or "")


async def test_a_token_that_cannot_be_decoded_ends_its_stream_and_its_work(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("x"))
        request = await worker.request()
        request.start()
        request.send_tokens([worker.model.vocab_size])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() == Status.INTERNAL
        await worker.until(lambda: request.abort_reply is False)
        other = gateway.stream(text("x"))
        (await worker.request(1)).finish()
        await collect(other)


async def test_a_code_this_gateway_does_not_know_is_internal(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("x"))
        (await worker.request()).fail(99, "from the future")  # type: ignore[arg-type]
        assert await call.code() == Status.INTERNAL


async def test_without_a_worker_everything_but_its_model_is_unavailable() -> None:
    config = GatewayConfig(listen="127.0.0.1:0", workers=("127.0.0.1:1",), drain_grace_s=0)
    async with running_gateway(config) as running, GatewayUnderTest(running) as gateway:
        await gateway.until_serving(False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.collect(text("x"))
        assert caught.value.code() == Status.UNAVAILABLE
        assert retry_delay_s(caught.value) > 0
        for call in (
            gateway.stub.GetModel(pb.GetModelRequest()),
            gateway.stub.Tokenize(pb.TokenizeRequest(text="x")),
            gateway.stub.FlushCache(pb.FlushCacheRequest()),
        ):
            assert await call.code() == Status.UNAVAILABLE
        load = await gateway.stub.GetLoad(pb.GetLoadRequest())
        assert [worker.ready for worker in load.workers] == [False]


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, Status.UNAUTHENTICATED),
        ("Bearer wrong", Status.UNAUTHENTICATED),
        ("Basic one", Status.UNAUTHENTICATED),
        ("one", Status.UNAUTHENTICATED),
        ("Bearer one", Status.OK),
        ("bearer two", Status.OK),
    ],
)
async def test_a_token_is_asked_for_where_one_is_configured(
    make_worker: MakeWorker, start_gateway: StartGateway, header: str | None, code: Status
) -> None:
    metadata = (("authorization", header),) if header else ()
    async with make_worker() as worker, start_gateway(worker, tokens=("one", "two")) as gateway:
        unary = gateway.stub.Generate(text("x"), metadata=metadata)
        assert await unary.code() == code
        stream = gateway.stub.GenerateStream(text("x"), metadata=metadata)
        if code == Status.OK:
            await collect(stream)
        assert await stream.code() == code
