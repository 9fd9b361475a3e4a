"""Several completions of one prompt: one call, one id, one end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from gateway.completion import Delta, Event
from gateway.merging import PromptSharing, merged
from shared.errors import Code
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2
from tests.answers import collect_all
from tests.gateway.client import error_of, text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet, StartQuietTwo
from tests.gateway.fake_worker import FakeWorker, Received
from tests.gateway.quiet import Quiet

Status = grpc.StatusCode


async def rest(worker: FakeWorker, count: int) -> list[Received]:
    """The requests of the completions 1 to count - 1, by index."""
    await worker.until(lambda: len(worker.requests) == count)
    later = worker.requests[1:]
    assert sorted(received.submit.index for received in later) == list(range(1, count))
    return sorted(later, key=lambda received: received.submit.index)


async def all_begun(pair: Quiet, count: int) -> tuple[Any, list[Received]]:
    """A call, and the requests of its completions: the first has a token, so all were sent."""
    call, first = await pair.begun(text("x", n=count))
    return call, [first, *await rest(pair.worker, count)]


async def test_every_completion_is_told_by_its_index(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answers = await collect_all(gateway.stream(text("hi 😀!", n=8, request_id="mine")))
        unary = await gateway.stub.Generate(text("hi 😀!", n=3))
    assert [answer.text for answer in answers] == ["hi 😀!"] * 8
    assert [answer.finished.index for answer in answers] == list(range(8))
    assert {answer.started.request_id for answer in answers} == {"mine"}
    assert all(answer.finished.usage.completion_tokens for answer in answers)
    assert [completion.index for completion in unary.completions] == [0, 1, 2]
    assert [completion.finished.index for completion in unary.completions] == [0, 1, 2]
    assert [completion.text for completion in unary.completions] == ["hi 😀!"] * 3


async def test_each_draws_with_a_seed_of_its_own_and_tells_it(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    sampling = pb.SamplingParams(seed=2**64 - 2)
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answers = await collect_all(gateway.stream(text("hi", n=4, sampling=sampling)))
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    assert [answer.finished.seed for answer in answers] == seeds
    submits = sorted((r.submit for r in worker.requests), key=lambda submit: submit.index)
    assert [submit.sampling.seed for submit in submits] == seeds
    assert len({submit.request_id for submit in submits}) == 1


async def test_the_others_are_sent_with_the_first_ones_first_token(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=3))
        first.start()
        assert (await call.read()).HasField("started")
        assert [received.submit.index for received in pair.worker.requests] == [0]
        # Half a character: a token, although it gives no text yet.
        first.send_tokens([166])
        for received in await rest(pair.worker, 3):
            received.start()
            received.send_tokens([100 + received.submit.index])
            received.finish()
        first.send_tokens([100])
        first.finish()
        events = [event async for event in _rest_of(call)]
    finished = [event.finished.index for event in events if event.HasField("finished")]
    assert sorted(finished) == [0, 1, 2]
    ids = {
        event.delta.index: list(event.delta.token_ids)
        for event in events
        if event.HasField("delta") and event.delta.index
    }
    assert ids == {1: [101], 2: [102]}


async def _rest_of(call: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    while isinstance(event := await call.read(), pb.GenerateStreamResponse):
        yield event


async def test_a_first_that_ends_without_a_token_lets_the_others_begin(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=2))
        first.start()
        first.finish(worker_pb2.FINISH_REASON_EOS, 2)
        (second,) = await rest(pair.worker, 2)
        second.start()
        second.finish(worker_pb2.FINISH_REASON_EOS, 2)
        answers = await collect_all(call)
    assert [answer.finished.eos_token_id for answer in answers] == [2, 2]


async def test_they_go_where_the_prompt_is_cached(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker() as one,
        make_worker() as two,
        start_gateway(one, two) as gateway,
    ):
        await collect_all(gateway.stream(text("hi", n=4)))
        assert sorted((len(one.requests), len(two.requests))) == [0, 4]


async def test_one_that_fails_fails_the_call_and_ends_the_others(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, (first, second, third) = await all_begun(pair, 3)
        second.fail(Code.INTERNAL, "logits were not finite")
        assert (await error_of(call, saying="not finite")).code() == Status.INTERNAL
        assert await pair.abort_replies(first, third) == [False, False]
        assert second.abort_reply is None


async def test_a_refusal_of_the_first_is_the_calls_and_nothing_else_is_sent(
    quiet: StartQuiet,
) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=8))
        first.reject(Code.RESOURCE_EXHAUSTED, "queue full", retry_after_ms=5)
        assert await call.code() == Status.RESOURCE_EXHAUSTED
        await pair.gateway.until_idle()
    assert len(pair.worker.requests) == 1


async def test_a_client_that_goes_ends_them_all(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, requests = await all_begun(pair, 3)
        call.cancel()
        assert await pair.abort_replies(*requests) == [False] * 3


async def test_abort_ends_them_all_with_true_usage(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=3, request_id="gone"))
        first.start()
        first.send_tokens([100, 101])
        for received in await rest(pair.worker, 3):
            received.start()
        await pair.gateway.stub.Abort(pb.AbortRequest(request_ids=["gone"]))
        answers = await collect_all(call)
    assert {answer.finished.finish_reason for answer in answers} == {pb.FINISH_REASON_ABORTED}
    assert [answer.finished.usage.completion_tokens for answer in answers] == [2, 0, 0]


async def test_abort_before_the_first_token_ends_those_that_were_never_sent(
    quiet: StartQuiet,
) -> None:
    async with quiet() as pair:
        call, _ = await pair.stream(text("x", n=3, request_id="gone"))
        await pair.gateway.stub.Abort(pb.AbortRequest(request_ids=["gone"]))
        answers = await collect_all(call)
    assert [answer.finished.finish_reason for answer in answers] == [pb.FINISH_REASON_ABORTED] * 3
    assert len(pair.worker.requests) == 1


async def test_an_abort_that_came_by_another_gateway_ends_them_all(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=2))
        first.start()
        first.finish(worker_pb2.FINISH_REASON_ABORTED)
        answers = await collect_all(call)
    assert [answer.finished.finish_reason for answer in answers] == [pb.FINISH_REASON_ABORTED] * 2
    assert len(pair.worker.requests) == 1


async def test_a_worker_that_is_lost_before_the_first_token_is_replaced(
    quiet_two: StartQuietTwo,
) -> None:
    async with quiet_two() as two:
        call, lost, other = await two.stream(text("x", n=2))
        await lost.crash()
        first = await other.request()
        first.start()
        first.send_tokens([100])
        first.finish()
        (second,) = await rest(other, 2)
        second.start()
        second.send_tokens([101])
        second.finish()
        answers = await collect_all(call)
        await lost.start()
    assert [answer.token_ids for answer in answers] == [[100], [101]]


async def test_a_gateway_that_shuts_down_ends_them_all(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, requests = await all_begun(pair, 3)
        await pair.gateway.running.live_requests.drain(0.05)
        assert (await error_of(call)).code() == Status.UNAVAILABLE
        assert await pair.abort_replies(*requests) == [False] * 3


async def test_a_deadline_ends_those_that_wait_too(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=3), timeout_s=0.3)
        first.start()
        assert (await error_of(call)).code() == Status.DEADLINE_EXCEEDED
        assert await pair.abort_replies(first) == [False]
        await pair.gateway.until_idle()
    assert len(pair.worker.requests) == 1


async def test_a_worker_lost_amid_its_tokens_ends_them_all(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, _ = await all_begun(pair, 2)
        await pair.worker.crash()
        assert (await error_of(call)).code() == Status.UNAVAILABLE
        await pair.worker.start()


async def test_a_time_limit_is_for_the_whole_call(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, first = await pair.stream(text("x", n=2, time_limit_ms=60_000))
        assert first.submit.time_limit_ms == 60_000
        first.start()
        assert (await call.read()).HasField("started")
        first.send_tokens([100])
        (second,) = await rest(pair.worker, 2)
        assert 0 < second.submit.time_limit_ms < 60_000
        call.cancel()


async def test_the_prompts_logprobs_come_once(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[10, 11, 12]),
        n=2,
        output=pb.OutputOptions(logprobs=1, prompt_logprobs=1),
    )
    async with make_worker() as worker, start_gateway(worker) as gateway:
        first, second = await collect_all(gateway.stream(request))
    assert len(first.started.prompt_logprobs) == 2
    assert not second.started.prompt_logprobs
    assert len(first.logprobs) == len(second.logprobs) == 3
    by_index = {received.submit.index: received.submit for received in worker.requests}
    assert by_index[0].HasField("prompt_logprobs")
    assert not by_index[1].HasField("prompt_logprobs")
    assert by_index[1].logprobs == 1


async def test_a_slow_reader_holds_them_up_after_one_event_each() -> None:
    produced, most_ahead = 0, 0

    async def stream(index: int) -> AsyncGenerator[Event, None]:
        nonlocal produced
        for _ in range(20):
            produced += 1
            yield Delta(index, "x", [100], None)

    async with merged([stream(0), stream(1)], PromptSharing()) as events:
        consumed = 0
        async for _ in events:
            consumed += 1
            for _ in range(5):
                await asyncio.sleep(0)
            most_ahead = max(most_ahead, produced - consumed)
    assert consumed == 40
    assert most_ahead <= 3
