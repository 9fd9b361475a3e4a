"""Requests through a gateway: what comes back, and how they end."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tandem_client import (
    AsyncClient,
    AsyncStream,
    CallCancelledError,
    Client,
    DeadlineExceededError,
    Delta,
    Finished,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    Message,
    NotFoundError,
    Started,
    Stream,
    TandemError,
    TokenLogprob,
    UnauthenticatedError,
    UnavailableError,
)
from tests.client.callers import AsyncCaller, Caller, StreamCaller, SyncCaller, collect
from tests.client.conftest import MakeCaller
from tests.client.scripted_server import ScriptedServer, delta, finished, started
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet
from tests.gateway.fake_worker import EOS, FakeWorker, Received


async def test_a_stream_is_started_then_text_then_finished(
    make_worker: MakeWorker, start_gateway: StartGateway, make_caller: MakeCaller
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        async with make_caller(gateway.address) as caller:
            stream = caller.stream("hi 😀!", seed=5, temperature=0)
            events = await collect(stream)
            ids = await caller.call("tokenize", "hi 😀!", add_special_tokens=False)
    first, *deltas, last = events
    assert isinstance(first, Started)
    assert (first.index, first.request_id) == (0, stream.request_id)
    assert first.prompt_tokens == len(ids)
    assert all(isinstance(event, Delta) and "\ufffd" not in event.text for event in deltas)
    assert "".join(event.text for event in deltas if isinstance(event, Delta)) == "hi 😀!"
    assert isinstance(last, Finished)
    assert last.finish_reason is FinishReason.STOP
    assert (last.eos_token_id, last.stop_token_id, last.stop_string) == (EOS, None, None)
    assert last.usage.completion_tokens == len(ids) + 1
    assert last.timings.total_ms >= last.timings.time_to_first_token_ms > 0
    assert last.seed == 5


async def test_a_completion_is_the_whole_of_its_stream(
    make_worker: MakeWorker, start_gateway: StartGateway, make_caller: MakeCaller
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        async with make_caller(gateway.address) as caller:
            ids = await caller.call("tokenize", "one two STOP three", add_special_tokens=False)
            whole = await caller.call("generate", ids, request_id="mine", max_tokens=3)
            stopped = await caller.call("generate", ids, stop_strings="STOP")
    assert whole.request_id == "mine"
    assert whole.token_ids == tuple(ids[:3])
    assert whole.text == "one two ST"
    assert whole.finish_reason is FinishReason.LENGTH
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 3)
    assert whole.timings is whole.finished.timings
    assert whole.logprobs == whole.prompt_logprobs == ()
    assert stopped.text == "one two "
    assert stopped.finished.stop_string == "STOP"
    assert stopped.seed == stopped.finished.seed


async def test_messages_may_be_mappings_or_objects(
    make_worker: MakeWorker, start_gateway: StartGateway, make_caller: MakeCaller
) -> None:
    as_mappings = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    as_objects = [Message("system", "Be brief."), Message("user", "Hi")]
    async with make_worker() as worker, start_gateway(worker) as gateway:
        async with make_caller(gateway.address) as caller:
            first = await caller.call("generate", as_mappings)
            second = await caller.call("generate", as_objects)
            ids = await caller.call("tokenize", as_objects)
            text = await caller.call("detokenize", ids, skip_special_tokens=False)
            assert list(worker.requests[0].submit.prompt_token_ids) == ids
    assert first.text == second.text
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in text


async def break_off(stream: StreamCaller) -> None:
    stream.close()


async def drop(stream: StreamCaller) -> None:
    """Leaves it to the caller to forget the stream."""


@pytest.mark.parametrize("leave", [break_off, drop])
async def test_leaving_a_stream_frees_its_request(
    quiet: StartQuiet,
    make_caller: MakeCaller,
    leave: Callable[[StreamCaller], object],
) -> None:
    async with quiet() as pair:
        async with make_caller(pair.gateway.address) as caller:
            stream: StreamCaller | None = caller.stream("x")
            request = await pair.worker.request()
            request.start()
            request.send_tokens([100])
            assert stream is not None
            async for event in stream:
                if isinstance(event, Delta):
                    break
            if leave is break_off:
                stream.close()
                assert await collect(stream) == []
            stream = None
            gc.collect()
            assert await pair.abort_replies(request) == [False]
            await pair.gateway.until_idle()


def first_text_of_a_block(client: Client) -> Stream:
    with client.stream("x") as stream:
        assert isinstance(stream, Stream)
        next(event for event in stream if isinstance(event, Delta))
    return stream


async def first_text_of_an_async_block(client: AsyncClient) -> AsyncStream:
    async with client.stream("x") as stream:
        assert isinstance(stream, AsyncStream)
        while not isinstance(await anext(stream), Delta):
            pass
    return stream


async def first_text_of_any_block(caller: Caller) -> Stream | AsyncStream:
    """The stream of a block that was left after the first text."""
    if isinstance(caller, SyncCaller):
        return await asyncio.to_thread(first_text_of_a_block, caller.client)
    assert isinstance(caller, AsyncCaller)
    return await first_text_of_an_async_block(caller.client)


async def test_leaving_the_block_of_a_stream_frees_its_request(
    quiet: StartQuiet, make_caller: MakeCaller
) -> None:
    async with quiet() as pair:
        async with make_caller(pair.gateway.address) as caller, asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(first_text_of_any_block(caller))
            request = await begun(pair.worker)
            # Held, and its client open: nothing but the end of the block can have ended it.
            stream = await reader
            assert await pair.abort_replies(request) == [False]
            stream.close()


async def begun(worker: FakeWorker) -> Received:
    """The worker's first request, once it has sent a token for it."""
    request = await worker.request()
    request.start()
    request.send_tokens([100])
    return request


async def test_cancelling_the_task_that_reads_frees_its_request(quiet: StartQuiet) -> None:
    async with (
        quiet() as pair,
        AsyncClient(pair.gateway.address) as client,
        asyncio.TaskGroup() as tasks,
    ):
        reader = tasks.create_task(client.generate("x"))
        request = await begun(pair.worker)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert reader.cancelled()
        assert await pair.abort_replies(request) == [False]


async def test_closing_a_stream_ends_whoever_reads_it(
    quiet: StartQuiet, make_caller: MakeCaller
) -> None:
    async with quiet() as pair:
        async with make_caller(pair.gateway.address) as caller, asyncio.TaskGroup() as tasks:
            stream = caller.stream("x")
            reader = tasks.create_task(collect(stream))
            request = await begun(pair.worker)
            stream.close()
            events = await reader
            assert not any(isinstance(event, Finished) for event in events)
            assert await pair.abort_replies(request) == [False]


async def outcome(caller: Caller) -> str:
    try:
        await caller.call("generate", "x")
    except CallCancelledError as error:
        return type(error).__name__
    return "no error"


async def test_closing_the_client_fails_what_is_under_way(
    quiet: StartQuiet, make_caller: MakeCaller
) -> None:
    async with quiet() as pair:
        async with make_caller(pair.gateway.address) as caller, asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(outcome(caller))
            await begun(pair.worker)
            await caller.close()
            assert await reader == "CallCancelledError"
            with pytest.raises(RuntimeError, match="closed"):
                await caller.call("generate", "x")


async def test_an_abort_ends_the_stream_in_good_order(
    quiet: StartQuiet, make_caller: MakeCaller
) -> None:
    async with quiet() as pair:
        async with make_caller(pair.gateway.address) as caller, asyncio.TaskGroup() as tasks:
            stream = caller.stream("x")
            reader = tasks.create_task(collect(stream))
            await begun(pair.worker)
            outcomes = await caller.call("abort", stream.request_id, "nobody's")
            assert outcomes == {stream.request_id: True, "nobody's": False}
            last = (await reader)[-1]
    assert isinstance(last, Finished)
    assert last.finish_reason is FinishReason.ABORTED


async def test_a_call_ends_with_its_timeout(quiet: StartQuiet, make_caller: MakeCaller) -> None:
    async with quiet() as pair:
        async with make_caller(pair.gateway.address, timeout_s=0.2) as caller:
            with pytest.raises(DeadlineExceededError):
                await caller.call("generate", "x")
            # One call's own counts before the client's.
            reader = asyncio.gather(caller.call("generate", "x", timeout_s=60))
            request = await pair.worker.request(1)
            assert request.submit.timeout_ms > 10_000
            request.start()
            request.finish()
            await reader


async def test_an_error_names_the_fields_at_fault(
    make_worker: MakeWorker, start_gateway: StartGateway, make_caller: MakeCaller
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        async with make_caller(gateway.address) as caller:
            with pytest.raises(InvalidArgumentError) as raised:
                await caller.call("generate", "x", top_p=1.5)
            with pytest.raises(NotFoundError, match=r"NOT_FOUND: model: 'other'"):
                await caller.call("generate", "x", model="other")
            with pytest.raises(InvalidArgumentError, match=r"chat\.messages"):
                await caller.call("generate", [])
    (violation,) = raised.value.violations
    assert violation.field == "sampling.top_p"
    assert "1.5" in violation.description
    assert raised.value.retry_after_s is None


async def test_the_model_the_load_and_the_health_are_told(
    make_worker: MakeWorker, start_gateway: StartGateway, make_caller: MakeCaller
) -> None:
    async with make_worker() as worker:
        async with start_gateway(worker) as gateway, make_caller(gateway.address) as caller:
            model = await caller.call("model")
            assert (model.model, model.eos_token_ids) == ("fake", (EOS,))
            assert model.has_chat_template
            load = await caller.call("load")
            assert load.live_requests == 0
            assert [(w.address, w.ready) for w in load.workers] == [(worker.address, True)]
            assert await caller.call("flush_cache") == 7
            assert await caller.call("health") is True
            worker.report_ready(False)
            await gateway.until_serving(False)
            assert await caller.call("health") is False
    async with make_caller("127.0.0.1:1") as nowhere:
        assert await nowhere.call("health") is False


async def test_a_token_opens_a_gateway_that_wants_one(
    make_worker: MakeWorker, start_gateway: StartGateway, make_caller: MakeCaller
) -> None:
    async with make_worker() as worker, start_gateway(worker, tokens=("s3cret",)) as gateway:
        async with make_caller(gateway.address, token="s3cret") as caller:
            assert (await caller.call("generate", "Hi")).text == "Hi"
        for token in (None, "other"):
            async with make_caller(gateway.address, token=token) as caller:
                assert await caller.call("health") is True
                with pytest.raises(UnauthenticatedError):
                    await caller.call("generate", "Hi")


async def test_text_beyond_four_mebibytes_comes_through(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(started(), delta("a" * (8 << 20)), finished())]
    async with make_caller(server.address) as caller:
        completion = await caller.call("generate", "b" * (8 << 20))
    assert len(completion.text) == len(server.requests[0].text) == 8 << 20


def unlikely(token_id: int) -> pb.TokenLogprobs:
    chosen = pb.TokenLogprob(
        token_id=token_id, text="\ufffd", token_bytes=b"\xe4", logprob=-9.5, rank=40
    )
    return pb.TokenLogprobs(chosen=chosen, top=[pb.TokenLogprob(token_id=0, rank=1)])


async def test_completions_of_one_prompt_are_told_apart(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [
        (
            started(0),
            delta("a", 0, token_ids=[1], logprobs=[unlikely(1)]),
            started(1),
            delta("x", 1, token_ids=[2]),
            delta("b", 0, token_ids=[3], logprobs=[unlikely(3)]),
            finished(0, seed=7, trailing_token_ids=[9], trailing_logprobs=[unlikely(9)]),
            finished(1, seed=8),
        )
    ]
    async with make_caller(server.address) as caller:
        first, second = await caller.call("generate_many", "Hi", 2)
    assert server.requests[0].n == 2
    assert (first.index, first.text, first.token_ids, first.seed) == (0, "ab", (1, 3, 9), 7)
    assert [entry.chosen.token_id for entry in first.logprobs] == [1, 3, 9]
    assert first.logprobs[0].chosen == TokenLogprob(1, "\ufffd", b"\xe4", -9.5, 40)
    assert [token.rank for token in first.logprobs[0].top] == [1]
    assert (second.index, second.text, second.token_ids, second.seed) == (1, "x", (2,), 8)


async def test_a_stream_cut_short_is_no_completion(
    server: ScriptedServer, make_caller: MakeCaller
) -> None:
    server.scripts = [(started(), delta("Hel"))]
    async with make_caller(server.address) as caller:
        with pytest.raises(InternalError, match="completion 0"):
            await caller.call("generate", "Hi")


async def test_every_error_is_of_one_tree(make_caller: MakeCaller) -> None:
    assert issubclass(UnavailableError, TandemError)
    async with make_caller("127.0.0.1:1") as caller:
        with pytest.raises(TandemError):
            await caller.call("model", timeout_s=0.5)
