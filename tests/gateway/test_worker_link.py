"""The link to a worker: found, lost, and found again."""

import asyncio
import time
from typing import cast

import grpc
import pytest

from gateway.config import GatewayConfig
from gateway.server import running_gateway
from gateway.worker_session import RunCall, WorkerSession
from shared.errors import UnavailableError
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2 as worker_pb
from tests.answers import collect
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet
from tests.gateway.fake_worker import FakeWorker

Status = grpc.StatusCode


async def lost(gateway: GatewayUnderTest, worker: FakeWorker) -> None:
    await worker.crash()
    await gateway.until(lambda: not gateway.running.router.links[0].is_ready)


async def test_a_worker_that_comes_back_is_found_again(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        assert (await gateway.collect(text("one"))).text == "one"
        await lost(gateway, worker)
        await gateway.until_serving(False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.collect(text("two"))
        assert caught.value.code() == Status.UNAVAILABLE
        tokens = await gateway.stub.Tokenize(pb.TokenizeRequest(text="text needs no worker"))
        assert len(tokens.token_ids) > 1
        await worker.start()
        await gateway.until_ready(1)
        assert (await gateway.collect(text("three"))).text == "three"
        # The files are the same, so they were not fetched again.
        assert worker.num_tokenizer_fetches == 1


async def test_a_cap_on_what_clients_send_is_none_on_what_workers_do(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker:
        assert max(map(len, worker.files.values())) > 1 << 16
        async with start_gateway(worker, max_message_bytes=1 << 16) as gateway:
            assert (await gateway.collect(text("hello"))).text == "hello"


async def test_a_new_tokenizer_is_fetched(
    make_worker: MakeWorker, start_gateway: StartGateway, served_files: dict[str, bytes]
) -> None:
    changed = {**served_files, "chat_template.jinja": b"{{ messages[0].content }}"}
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await lost(gateway, worker)
        successor = make_worker(files=changed)
        successor.port = worker.port
        async with successor:
            await gateway.until_ready(1)
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="bare")])
            assert (await gateway.collect(pb.GenerateRequest(chat=chat))).text == "bare"
            assert successor.num_tokenizer_fetches == 1


async def test_a_damaged_tokenizer_is_not_used(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.files["chat_template.jinja"] += b" "
    async with worker:
        config = GatewayConfig(listen="127.0.0.1:0", workers=(worker.address,), drain_grace_s=0)
        async with running_gateway(config) as running:
            await worker.until(lambda: worker.num_links > 1)
            assert running.router.num_ready == 0


async def test_streams_of_a_lost_worker_say_how_far_they_came(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.begun()
        request.send_tokens([101])
        request.send_tokens([102])
        assert (await call.read()).HasField("started")
        delivered = 0
        while delivered < 3:
            delivered += len((await call.read()).delta.token_ids)
        begin = asyncio.get_running_loop().time()
        await pair.worker.crash()
        with pytest.raises(grpc.aio.AioRpcError, match="after 3 tokens") as caught:
            await call.read()
        assert asyncio.get_running_loop().time() - begin < 1
        assert caught.value.code() == Status.UNAVAILABLE


async def test_a_worker_that_says_it_is_not_ready_gets_nothing(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        worker.report_ready(False)
        await gateway.until_serving(False)
        assert await gateway.stream(text("x")).code() == Status.UNAVAILABLE
        worker.report_ready(True)
        await gateway.until_serving(True)
        assert (await gateway.collect(text("back"))).text == "back"


async def test_a_stream_closed_in_good_order_is_opened_again(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        worker.close_links()
        await worker.until(lambda: worker.num_links > 1)
        await gateway.until_ready(1)
        assert (await gateway.collect(text("again"))).text == "again"


async def test_a_worker_that_hangs_counts_as_lost(quiet: StartQuiet) -> None:
    async with quiet(worker_silence_limit_s=0.3) as pair:
        call, _ = await pair.stream()
        pair.worker.answers_pings = False
        assert await call.code() == Status.UNAVAILABLE
        pair.worker.answers_pings = True
        await pair.gateway.until_ready(1)


async def test_a_pause_of_the_gateway_itself_is_no_silence_of_the_worker(quiet: StartQuiet) -> None:
    async with quiet(worker_silence_limit_s=0.3) as pair:
        call, received = await pair.stream()
        be_stopped(0.6)
        received.start()
        received.finish()
        assert (await collect(call)).finished.finish_reason == pb.FINISH_REASON_LENGTH


def be_stopped(seconds: float) -> None:
    """As a process that gets no time: nothing runs meanwhile, and then everything is due."""
    time.sleep(seconds)


async def test_a_session_whose_call_ends_while_it_writes_says_what_the_reader_learned() -> None:
    session = WorkerSession(
        "a worker",
        cast(RunCall, EndingCall()),
        ping_interval_s=60,
        silence_limit_s=300,
        on_load=lambda _: None,
        on_lag=lambda _: None,
        on_prefixes=lambda _: None,
        coalesces=True,
    )
    with pytest.raises(ExceptionGroup) as caught:
        await session.run()
    (error,) = caught.value.exceptions
    assert isinstance(error, UnavailableError)
    assert "closed the stream" in error.message


class EndingCall:
    """A call that has ended when the first command is written, which its reader hears later."""

    def __init__(self) -> None:
        self._written = asyncio.Event()

    async def write(self, command: worker_pb.RunRequest) -> None:
        self._written.set()
        raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> object:
        await self._written.wait()
        return grpc.aio.EOF

    def cancel(self) -> None:
        """Has no effect any more."""


async def test_many_requests_at_once_keep_their_own_tokens(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(step_s=0.001) as worker, start_gateway(worker) as gateway:
        prompts = [[1000 + 10 * index + i for i in range(8)] for index in range(64)]
        answers = await asyncio.gather(
            *(
                gateway.collect(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt)))
                for prompt in prompts
            )
        )
        assert [answer.token_ids for answer in answers] == prompts
