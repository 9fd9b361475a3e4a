"""The link to workers: found, lost, found again, and chosen among."""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import grpc
import pytest

from gateway.affinity import PromptPrefix
from gateway.backoff import Backoff, Breaker
from gateway.config import GatewayConfig
from gateway.server import running_gateway
from gateway.tokenizer import TextTokenizer
from gateway.worker_session import RunCall, WorkerSession
from shared.errors import Code, UnavailableError
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2 as worker_pb
from tests.answers import collect
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import StartGateway
from tests.gateway.fake_worker import FakeWorker

Status = grpc.StatusCode
MakeWorker = Callable[..., FakeWorker]


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


async def test_a_new_tokenizer_is_fetched(
    make_worker: MakeWorker, start_gateway: StartGateway, smollm2_files: dict[str, bytes]
) -> None:
    changed = {**smollm2_files, "chat_template.jinja": b"{{ messages[0].content }}"}
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


async def test_streams_of_a_lost_worker_say_how_far_they_came(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("x"))
        request = await worker.request()
        request.start()
        for token_id in (100, 101, 102):
            request.send_tokens([token_id])
        events = [await call.read()]
        delivered = 0
        while delivered < 3:
            event = await call.read()
            events.append(event)
            delivered += len(event.delta.token_ids)
        begin = asyncio.get_running_loop().time()
        await worker.crash()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert asyncio.get_running_loop().time() - begin < 1
        assert caught.value.code() == Status.UNAVAILABLE
        assert "after 3 tokens" in (caught.value.details() or "")


async def test_a_request_without_a_token_moves_to_another_worker(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
        start_gateway(one, other) as gateway,
    ):
        call = gateway.stream(text("x"))
        await gateway.until(lambda: bool(one.requests or other.requests))
        first, second = (one, other) if one.requests else (other, one)
        # It was taken up there, but gave no token.
        first.requests[0].start()
        await call.read()
        await first.crash()
        request = await second.request()
        request.start()
        request.send_tokens([100])
        request.finish()
        assert (await call.read()).WhichOneof("event") == "delta"
        assert (await call.read()).finished.usage.completion_tokens == 1


async def test_the_usage_of_a_moved_request_is_that_of_the_worker_which_served_it(
    make_worker: MakeWorker, start_gateway: StartGateway, smollm2: TextTokenizer
) -> None:
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
        start_gateway(one, other) as gateway,
    ):
        call = gateway.stream(text("x y z", stopping=pb.StopConditions(stop_strings=["STOP"])))
        await gateway.until(lambda: bool(one.requests or other.requests))
        first, second = (one, other) if one.requests else (other, one)
        first.requests[0].start(cached_tokens=2)
        await call.read()
        await first.crash()
        request = await second.request()
        request.start(cached_tokens=1)
        request.send_tokens(smollm2.encode("STOP", add_special_tokens=False))
        finished = (await call.read()).finished
        assert finished.stop_string == "STOP"
        assert finished.usage.cached_tokens == 1
        assert await call.read() is grpc.aio.EOF


async def test_a_refusal_as_unavailable_is_tried_elsewhere(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
        start_gateway(one, other) as gateway,
    ):
        call = gateway.stream(text("x"))
        await gateway.until(lambda: bool(one.requests or other.requests))
        first, second = (one, other) if one.requests else (other, one)
        first.requests[0].reject(Code.UNAVAILABLE, "draining")
        (await second.request()).finish()
        await collect(call)


async def test_a_refusal_by_a_full_queue_is_tried_where_there_may_be_room(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
        start_gateway(one, other) as gateway,
    ):
        call = gateway.stream(text("x"))
        await gateway.until(lambda: bool(one.requests or other.requests))
        first, second = (one, other) if one.requests else (other, one)
        first.requests[0].reject(Code.RESOURCE_EXHAUSTED, "full", retry_after_ms=1000)
        (await second.request()).reject(Code.RESOURCE_EXHAUSTED, "full too", retry_after_ms=2000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() == Status.RESOURCE_EXHAUSTED
        assert "full too" in (caught.value.details() or "")
        assert len(one.requests) == len(other.requests) == 1


async def test_a_worker_whose_queue_is_known_to_be_full_is_passed_over(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    # A prompt that is cached at the first worker, so that it would get the next one, too.
    prompt = "one two three four five six seven eight nine ten " * 5
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
    ):
        for worker in (one, other):
            worker.model.max_running, worker.model.max_waiting = 1, 1
        async with start_gateway(one, other) as gateway:
            calls = [gateway.stream(text(prompt)) for _ in range(4)]
            await gateway.until(lambda: len(one.requests) + len(other.requests) == 4)
            assert len(one.requests) == len(other.requests) == 2
            for request in one.requests + other.requests:
                request.finish()
            for call in calls:
                await collect(call)


async def test_a_conversation_stays_with_its_worker_until_that_is_lost(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    talks = [f"{number} is a talk of its own, about this and that. " * 4 for number in range(6)]
    async with make_worker() as one, make_worker() as other, start_gateway(one, other) as gateway:
        for turn in range(3):
            for talk in talks:
                await gateway.collect(text(talk + "and so on " * 5 * turn, max_tokens=1))
        prompts = [[r.submit.prompt_token_ids[:40] for r in w.requests] for w in (one, other)]
        for own, others in (prompts, prompts[::-1]):
            assert all(own.count(prompt) == 3 and prompt not in others for prompt in own)
        worker = one if one.requests else other
        (link,) = (x for x in gateway.running.router.links if x.address == worker.address)
        prompt = PromptPrefix(worker.requests[0].submit.prompt_token_ids)
        assert link.prefixes.matched_tokens(prompt, link.page_size) >= 32
        await worker.crash()
        await gateway.until_ready(1)
        assert link.prefixes.matched_tokens(prompt, link.page_size) == 0


async def test_what_a_worker_tells_of_its_cache_reaches_the_router(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    prompt = PromptPrefix(range(100))
    async with make_worker() as worker, start_gateway(worker) as gateway:
        (link,) = gateway.running.router.links
        names = prompt.names(link.page_size)
        worker.report_prefixes([names[2]])
        await gateway.until(lambda: link.prefixes.matched_tokens(prompt, link.page_size) == 48)
        worker.report_prefixes([])
        await gateway.until(lambda: link.prefixes.matched_tokens(prompt, link.page_size) == 0)


async def test_any_other_refusal_is_final(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
        start_gateway(one, other) as gateway,
    ):
        call = gateway.stream(text("x"))
        await gateway.until(lambda: bool(one.requests or other.requests))
        (one.requests or other.requests)[0].reject(Code.RESOURCE_EXHAUSTED, "full")
        assert await call.code() == Status.RESOURCE_EXHAUSTED
        assert len(one.requests) + len(other.requests) == 1


async def test_when_every_worker_was_tried_the_last_reason_is_told(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(echoes=False) as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("x"))
        (await worker.request()).reject(Code.UNAVAILABLE, "draining now")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() == Status.UNAVAILABLE
        assert "draining now" in (caught.value.details() or "")


async def test_the_loss_of_a_worker_with_many_streams_is_one_fault(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker, breaker_threshold=2, breaker_cool_down_s=60) as gateway,
    ):
        (link,) = gateway.running.router.links
        for losses, is_suspect in ((1, False), (2, True)):
            calls = [gateway.stream(text("x")) for _ in range(3)]
            await worker.request(3 * losses - 1)
            await lost(gateway, worker)
            assert [await call.code() for call in calls] == [Status.UNAVAILABLE] * 3
            assert link.is_suspect(time.monotonic()) is is_suspect
            await worker.start()
            await gateway.until_ready(1)


@pytest.mark.parametrize(
    ("code", "is_suspect"),
    [
        (Code.INVALID_ARGUMENT, False),
        (Code.RESOURCE_EXHAUSTED, False),
        (Code.DEADLINE_EXCEEDED, False),
        (Code.INTERNAL, True),
        (Code.UNAVAILABLE, True),
    ],
)
async def test_only_faults_of_its_own_make_a_worker_suspect(
    make_worker: MakeWorker, start_gateway: StartGateway, code: Code, is_suspect: bool
) -> None:
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker, breaker_threshold=1, breaker_cool_down_s=60) as gateway,
    ):
        call = gateway.stream(text("x"))
        (await worker.request()).reject(code, "no")
        assert await call.code() != Status.OK
        await gateway.until_idle()
        (link,) = gateway.running.router.links
        assert link.is_suspect(time.monotonic()) is is_suspect


async def test_requests_go_to_the_worker_with_fewer(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as one,
        make_worker(echoes=False) as other,
        start_gateway(one, other) as gateway,
    ):
        calls = [gateway.stream(text("x")) for _ in range(6)]
        await gateway.until(lambda: len(one.requests) + len(other.requests) == 6)
        assert len(one.requests) == len(other.requests) == 3
        for request in one.requests + other.requests:
            request.finish()
        for call in calls:
            await collect(call)


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


async def test_a_worker_that_hangs_counts_as_lost(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker, worker_silence_limit_s=0.3) as gateway,
    ):
        call = gateway.stream(text("x"))
        await worker.request()
        worker.answers_pings = False
        assert await call.code() == Status.UNAVAILABLE
        worker.answers_pings = True
        await gateway.until_ready(1)


async def test_a_pause_of_the_gateway_itself_is_no_silence_of_the_worker(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker, worker_silence_limit_s=0.3) as gateway,
    ):
        call = gateway.stream(text("x"))
        received = await worker.request()
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


def test_a_backoff_begins_short_doubles_and_stops_growing() -> None:
    backoff = Backoff(0.1, 1.0)
    waits = [backoff.next_s() for _ in range(8)]
    assert 0.07 < waits[0] < 0.13
    assert 0.15 < waits[1] < 0.25
    assert 0.75 <= waits[-1] <= 1.25
    backoff.reset()
    assert backoff.next_s() < 0.13


def test_a_breaker_opens_after_faults_in_a_row_and_closes_with_time() -> None:
    breaker = Breaker(threshold=2, cool_down_s=5)
    breaker.record_fault(now=0)
    breaker.record_success()
    breaker.record_fault(now=1)
    assert not breaker.is_open(now=1)
    breaker.record_fault(now=2)
    assert breaker.is_open(now=6.9)
    assert not breaker.is_open(now=7)
