"""Cancelled, aborted, timed out or unread: a request ends once, at the worker as well."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.live_requests import AbortedEarlyError, LiveRequests
from gateway.stream_writer import deadline, stream_writer
from gateway.tokenizer import TextTokenizer
from shared.errors import DeadlineExceededError, QueueFullError
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect
from tests.gateway.client import error_of, text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet, StartQuietTwo
from tests.gateway.fake_worker import Received
from tests.gateway.quiet import Quiet

Status = grpc.StatusCode


async def test_a_client_that_goes_takes_its_request_along(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.begun()
        await call.read()
        await call.read()
        call.cancel()
        assert await pair.abort_replies(request) == [False]


async def test_a_unary_client_that_goes_takes_its_request_along(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call = pair.gateway.stub.Generate(text("x"))
        request = await pair.worker.request()
        assert request.abort_reply is None
        call.cancel()
        assert await pair.abort_replies(request) == [False]


async def test_a_finished_request_is_not_aborted(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await gateway.collect(text("one"))
        await gateway.collect(text("two"))
        assert [request.abort_reply for request in worker.requests] == [None, None]


async def test_a_deadline_goes_to_the_worker_and_ends_the_call(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream(timeout_s=0.3)
        assert 0 < request.submit.timeout_ms <= 300
        assert await call.code() == Status.DEADLINE_EXCEEDED
        assert await pair.abort_replies(request) == [False]


async def test_a_request_without_a_deadline_gets_the_default(quiet: StartQuiet) -> None:
    async with quiet(default_timeout_s=0.2) as pair:
        call, request = await pair.stream(timeout_s=None)
        # What encoding has left of it.
        assert 0 < request.submit.timeout_ms <= 200
        assert (await error_of(call, saying="0.2 s")).code() == Status.DEADLINE_EXCEEDED
        assert await pair.abort_replies(request) == [False]


async def test_no_deadline_is_none_at_the_worker_too(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await collect(gateway.stream(text("x"), timeout_s=None))
        assert worker.requests[0].submit.timeout_ms == 0


async def test_a_deadline_in_months_is_as_good_as_none(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await collect(gateway.stream(text("x"), timeout_s=1e7))
        assert worker.requests[0].submit.timeout_ms == (1 << 32) - 1


async def test_abort_ends_the_stream_ok_with_true_usage(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream(text("x", request_id="gone"))
        request.start()
        request.send_tokens([100, 101])
        asked = pb.AbortRequest(request_ids=["gone", "never-was"])
        outcomes = (await pair.gateway.stub.Abort(asked)).outcomes
        answer = await collect(call)
        again = (await pair.gateway.stub.Abort(asked)).outcomes
    assert [outcome.outcome for outcome in outcomes] == [
        pb.AbortOutcome.OUTCOME_ABORTED,
        pb.AbortOutcome.OUTCOME_NOT_FOUND,
    ]
    assert {outcome.outcome for outcome in again} == {pb.AbortOutcome.OUTCOME_NOT_FOUND}
    assert answer.finished.finish_reason == pb.FINISH_REASON_ABORTED
    assert answer.finished.usage.completion_tokens == len(answer.token_ids) == 2
    assert request.abort_reply is True


async def test_abort_reaches_requests_of_another_gateway(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker) as one,
        start_gateway(worker) as other,
    ):
        call = one.stream(text("x", request_id="elsewhere"))
        await worker.request()
        answer = await other.stub.Abort(pb.AbortRequest(request_ids=["elsewhere"]))
        assert answer.outcomes[0].outcome == pb.AbortOutcome.OUTCOME_ABORTED
        assert (await collect(call)).finished.finish_reason == pb.FINISH_REASON_ABORTED


async def test_abort_ends_a_request_that_is_still_being_tokenized(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(max_context=1 << 20) as worker,
        start_gateway(worker, tokenizer_threads=1) as gateway,
    ):
        # One thread: the second waits for as long as the first is encoded.
        first = gateway.stream(text("many words " * (1 << 18)))
        await gateway.until(lambda: len(gateway.running.live_requests) == 1)
        second = gateway.stream(text("x", request_id="waiting"))
        await gateway.until(lambda: len(gateway.running.live_requests) == 2)
        answer = await gateway.stub.Abort(pb.AbortRequest(request_ids=["waiting"]))
        assert answer.outcomes[0].outcome == pb.AbortOutcome.OUTCOME_ABORTED
        ended = await collect(second)
        assert ended.finished.finish_reason == pb.FINISH_REASON_ABORTED
        assert ended.finished.usage.completion_tokens == 0
        assert len(worker.requests) == 0
        first.cancel()


async def test_an_abort_in_the_moment_when_the_tokens_are_there_is_not_lost() -> None:
    requests = LiveRequests(1)
    work: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    with requests.admit("x") as live, pytest.raises(AbortedEarlyError):
        # The future is done, but the request does not know it yet.
        asyncio.get_running_loop().call_soon(work.set_result, [1])
        asyncio.get_running_loop().call_soon(requests.abort, "x")
        await live.uninterrupted(work)


async def test_an_aborted_request_is_not_tried_elsewhere_when_its_worker_is_lost(
    quiet_two: StartQuietTwo,
) -> None:
    async with quiet_two() as two:
        call, first, second = await two.stream(text("x", request_id="gone"))
        first.answers_aborts = False
        request = first.requests[0]
        request.start()
        await call.read()
        await two.gateway.stub.Abort(pb.AbortRequest(request_ids=["gone"]))
        await first.until(lambda: request.abort_reply is True)
        await first.crash()
        ended = (await call.read()).finished
        assert ended.finish_reason == pb.FINISH_REASON_ABORTED
        assert ended.usage.completion_tokens == 0
        assert await call.read() is grpc.aio.EOF
        assert second.requests == []


async def test_a_client_that_does_not_read_costs_no_more_than_its_tokens(quiet: StartQuiet) -> None:
    async with quiet(model={"max_context": 4096}) as pair:
        call, slow = await pair.stream(text("x", max_tokens=2000))
        slow.start()
        for token_id in range(1000, 3000):
            slow.send_tokens([token_id])
        slow.finish()
        other, quick = await pair.begun()
        quick.finish()
        assert (await collect(other)).token_ids == [100]
        answer = await collect(call)
    assert answer.token_ids == list(range(1000, 3000))
    assert answer.finished.usage.completion_tokens == 2000


async def unread(pair: Quiet, tokenizer: TextTokenizer) -> tuple[Any, Received]:
    """A call with 25 MB of text: more than every buffer on the way holds."""
    (newline_and_80_spaces,) = tokenizer.encode("\n" + " " * 80, add_special_tokens=False)
    call, request = await pair.stream(text("x", max_tokens=1 << 20))
    request.start()
    for _ in range(300):
        request.send_tokens([newline_and_80_spaces] * 1024)
    return call, request


async def another_is_served(pair: Quiet) -> None:
    """It gets through, and is behind all that was sent on the same link before it."""
    other, request = await pair.begun()
    request.finish()
    assert (await collect(other)).token_ids == [100]


async def test_a_client_that_never_reads_is_cut_off_and_its_request_ends(
    quiet: StartQuiet, smollm2_files: dict[str, bytes], smollm2: TextTokenizer
) -> None:
    roomy = {"files": smollm2_files, "max_context": 1 << 21}
    async with quiet(model=roomy, slow_reader_limit_s=0.2) as pair:
        call, request = await unread(pair, smollm2)
        assert await pair.abort_replies(request) == [False]
        await pair.gateway.until_idle()
        await another_is_served(pair)
        error = await error_of(call, saying="not read for 0.2 s")
        assert error.code() == Status.RESOURCE_EXHAUSTED


async def test_a_client_that_goes_while_a_write_to_it_waits_takes_its_request_along(
    quiet: StartQuiet, smollm2_files: dict[str, bytes], smollm2: TextTokenizer
) -> None:
    roomy = {"files": smollm2_files, "max_context": 1 << 21}
    async with quiet(model=roomy) as pair:
        call, request = await unread(pair, smollm2)
        await another_is_served(pair)
        assert request.abort_reply is None
        call.cancel()
        assert await pair.abort_replies(request) == [False]


class StuckContext:
    """A client that never reads: the first write goes out, the others wait."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        if self.written:
            await asyncio.Event().wait()
        self.written.append(message)


async def test_a_client_that_does_not_read_for_too_long_is_cut_off() -> None:
    context = StuckContext()
    with pytest.raises(QueueFullError, match="not read for"):
        async with stream_writer(context, 0.02) as writer:
            await writer.write(1)
            await writer.write(2)
    assert context.written == [1]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_slow_stream_is_no_slow_reader() -> None:
    context = StuckContext()
    async with stream_writer(context, 0.01) as writer:
        await writer.write(1)
        await asyncio.sleep(0.05)
    assert context.written == [1]


async def test_a_deadline_inside_a_stream_is_told_from_a_slow_reader() -> None:
    with pytest.raises(DeadlineExceededError):
        async with stream_writer(StuckContext(), 30) as writer, deadline(0.01):
            await writer.write(1)
            await writer.write(2)
