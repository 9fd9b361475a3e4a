"""What a worker answers, or that there is none, reaches the client as its status."""

import grpc
import pytest

from gateway.config import GatewayConfig
from gateway.server import running_gateway
from shared.errors import Code
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect, retry_delay_s
from tests.gateway.client import GatewayUnderTest, error_of, text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet

Status = grpc.StatusCode


async def test_a_live_id_is_refused_and_the_first_is_unharmed(quiet: StartQuiet) -> None:
    same = text("x", request_id="same")
    async with quiet() as pair:
        first, request = await pair.stream(same)
        assert (await error_of(pair.gateway.stream(same))).code() == Status.ALREADY_EXISTS
        request.start()
        request.send_tokens([100])
        request.finish()
        assert (await collect(first)).token_ids == [100]
        again, request = await pair.stream(same)
        request.finish()
        assert (await collect(again)).token_ids == []


async def test_more_live_requests_than_allowed_are_refused_at_once(quiet: StartQuiet) -> None:
    async with quiet(max_live_requests=1) as pair:
        first, request = await pair.stream()
        error = await error_of(pair.gateway.stream(text("x")))
        assert error.code() == Status.RESOURCE_EXHAUSTED
        assert retry_delay_s(error) > 0
        request.finish()
        await collect(first)


async def test_a_full_worker_says_when_to_come_again(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream()
        request.reject(Code.RESOURCE_EXHAUSTED, "queue full", retry_after_ms=1500)
        error = await error_of(call)
        assert error.code() == Status.RESOURCE_EXHAUSTED
        assert retry_delay_s(error) == 1.5


async def test_a_fault_of_the_engine_is_internal(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.begun()
        request.fail(Code.INTERNAL, "logits were not finite")
        assert (await error_of(call, saying="not finite")).code() == Status.INTERNAL


async def test_a_token_that_cannot_be_decoded_ends_its_stream_and_its_work(
    quiet: StartQuiet,
) -> None:
    async with quiet() as pair:
        call, request = await pair.stream()
        request.start()
        request.send_tokens([pair.worker.model.vocab_size])
        assert (await error_of(call)).code() == Status.INTERNAL
        assert await pair.abort_replies(request) == [False]
        other, request = await pair.begun()
        request.finish()
        assert (await collect(other)).token_ids == [100]


async def test_a_code_this_gateway_does_not_know_is_internal(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream()
        request.fail(99, "from the future")  # type: ignore[arg-type]
        assert await call.code() == Status.INTERNAL


async def test_without_a_worker_everything_but_its_model_is_unavailable() -> None:
    config = GatewayConfig(listen="127.0.0.1:0", workers=("127.0.0.1:1",), drain_grace_s=0)
    async with running_gateway(config) as running, GatewayUnderTest(running) as gateway:
        await gateway.until_serving(False)
        error = await error_of(gateway.stream(text("x")))
        assert error.code() == Status.UNAVAILABLE
        assert retry_delay_s(error) > 0
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
