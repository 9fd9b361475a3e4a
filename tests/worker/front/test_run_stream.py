"""One Run stream: requests in, tokens and exactly one ending out."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
import structlog
from prometheus_client import CollectorRegistry

from shared.errors import Code
from shared.metrics import WorkerMetrics
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.worker.front.conftest import MakeWorker
from tests.worker.front.harness import FrontWorker
from worker.dispatcher import Dispatcher, DispatcherLimits
from worker.messages import Heartbeat, Load
from worker.service import Context, ServedLimits, WorkerService


async def test_a_request_is_accepted_started_echoed_and_finished(worker: FrontWorker) -> None:
    link = worker.link()
    await link.submit(7, [10, 11, 12, 13])
    outcome = await link.outcome(7)
    assert outcome.accepted
    assert outcome.started == 1
    assert outcome.token_ids == [10, 11, 12, 13]
    assert outcome.reason == pb.FINISH_REASON_EOS
    finished = outcome.finished[0]
    assert (finished.matched_token_id, finished.completion_tokens) == (2, 5)


async def test_many_requests_at_once_each_get_their_own_tokens_and_one_ending(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(max_running=16, max_waiting=64) as worker:
        links = [worker.link() for _ in range(3)]
        for handle in range(20):
            for number, link in enumerate(links):
                prompt = [100 * number + handle + 3] * (handle % 7 + 1)
                await link.submit(handle, prompt, request_id=f"{number}-{handle}")
        for number, link in enumerate(links):
            for handle in range(20):
                outcome = await link.outcome(handle)
                assert outcome.token_ids == [100 * number + handle + 3] * (handle % 7 + 1)
                assert outcome.num_endings == outcome.started == 1
        await worker.assert_clean()


async def test_the_load_comes_first_and_a_ping_is_answered(worker: FrontWorker) -> None:
    link = worker.link()
    await link.send(ping=pb.Ping(nonce=99))
    await link.until(lambda: link.pongs == [99])
    assert link.loads[0].ready
    assert link.loads[0].pages_total > 0


async def test_a_second_live_request_with_the_same_id_is_refused_and_the_first_goes_on(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=20) as worker:
        first, second = worker.link(), worker.link()
        await first.submit(1, [10, 11, 12, 13, 14], request_id="x")
        await first.until(lambda: first[1].accepted)
        await second.submit(1, [20, 21], request_id="x")
        assert (await second.outcome(1)).failure.code == Code.ALREADY_EXISTS
        assert (await first.outcome(1)).token_ids == [10, 11, 12, 13, 14]
        await second.submit(2, [20, 21], request_id="x")
        assert (await second.outcome(2)).token_ids == [20, 21]
        await worker.assert_clean()


async def test_an_abort_with_reply_finishes_as_aborted(make_worker: MakeWorker) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        link = worker.link()
        await link.submit(1, range(10, 60))
        await link.until(lambda: len(link[1].token_ids) >= 3)
        await link.abort(1, reply=True)
        outcome = await link.outcome(1)
        assert outcome.reason == pb.FINISH_REASON_ABORTED
        assert outcome.finished[0].completion_tokens >= 3
        await worker.assert_clean()


async def test_an_abort_without_reply_says_nothing_more_and_frees_the_id(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        link = worker.link()
        await link.submit(1, range(10, 60), request_id="x")
        await link.until(lambda: len(link[1].token_ids) >= 3)
        await link.abort(1, reply=False)
        await link.submit(2, [5, 6], request_id="x")
        assert (await link.outcome(2)).token_ids == [5, 6]
        assert link[1].num_endings == 0
        await worker.assert_clean()


async def test_a_late_abort_and_one_of_a_stranger_do_nothing(worker: FrontWorker) -> None:
    link = worker.link()
    await link.submit(1, [10, 11])
    await link.outcome(1)
    await link.abort(1, 2, 3, reply=True)
    await link.abort(1, 2, 3, reply=False)
    await link.submit(4, [20])
    assert (await link.outcome(4)).token_ids == [20]
    assert link[1].num_endings == 1
    assert link[2].num_endings == link[3].num_endings == 0


async def test_an_abort_by_public_id_reaches_a_request_of_another_stream(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        link = worker.link()
        await link.submit(1, range(10, 60), request_id="x")
        await link.until(lambda: link[1].started == 1)
        request = pb.AbortRequest(request_ids=["unknown", "x", "x"])
        answer = await worker.stub.Abort(request)
        assert list(answer.aborted_request_ids) == ["x"]
        assert (await link.outcome(1)).reason == pb.FINISH_REASON_ABORTED
        assert not (await worker.stub.Abort(request)).aborted_request_ids
        await worker.assert_clean()


async def test_completions_share_an_id_and_an_abort_by_it_ends_them_all(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        one, other = worker.link(), worker.link()
        for link, handle, index in ((one, 1, 0), (one, 2, 7), (other, 1, 3)):
            await link.submit(handle, range(10, 60), request_id="x", index=index)
        await one.until(lambda: one[1].started == one[2].started == 1)
        await other.until(lambda: other[1].started == 1)
        await other.submit(2, [5], request_id="x", index=7)
        assert (await other.outcome(2)).failure.code == Code.ALREADY_EXISTS
        await other.submit(3, range(10, 60), request_id="y")
        answer = await worker.stub.Abort(pb.AbortRequest(request_ids=["x"]))
        assert list(answer.aborted_request_ids) == ["x"]
        for link, handle in ((one, 1), (one, 2), (other, 1)):
            assert (await link.outcome(handle)).reason == pb.FINISH_REASON_ABORTED
        assert (await other.outcome(3)).token_ids == list(range(10, 60))
        await worker.assert_clean()


async def test_logprobs_come_with_their_tokens_and_a_prompt_s_before_them(
    worker: FrontWorker,
) -> None:
    link = worker.link()
    await link.submit(1, [10, 11, 12], logprobs=3, prompt_logprobs=3)
    await link.submit(2, [10, 11, 12])
    asked, plain = await link.outcome(1), await link.outcome(2)
    # An echo was certain of every token, and knew of no others; its eos is not told of.
    assert asked.logprobs == [(token, 0.0, 1) for token in (10, 11, 12)]
    assert asked.prompt_logprobs == [(token, 0.0, 1) for token in (11, 12)]
    assert not plain.logprobs and not plain.prompt_logprobs


async def test_dropping_the_stream_frees_all_that_ran_and_waited_on_it(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=20) as worker:
        link = worker.link()
        for handle in range(8):
            await link.submit(handle, range(10, 90), max_tokens=40)
        await link.until(lambda: len(link[0].token_ids) >= 2)
        load = await worker.load()
        assert (load.running, load.waiting) == (4, 4) and load.pages_held > 0
        link.call.cancel()
        await worker.assert_clean()
        await worker.assert_next_works()


async def test_a_half_closed_stream_ends_well_after_its_last_request(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        link = worker.link()
        await link.submit(1, [10, 11, 12])
        await link.call.done_writing()
        assert (await link.outcome(1)).token_ids == [10, 11, 12]
        assert await link.ending() is grpc.StatusCode.OK


async def test_a_full_queue_is_told_at_once_even_while_a_long_step_runs(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=300) as worker:
        link = worker.link()
        for handle in range(8):
            await link.submit(handle, [10])
        await link.until(lambda: link[0].started == 1)
        began = asyncio.get_running_loop().time()
        for handle in range(8, 12):
            await link.submit(handle, [10])
        for handle in range(8, 12):
            failure = (await link.outcome(handle)).failure
            assert failure.code == Code.RESOURCE_EXHAUSTED
            assert failure.retry_after_ms > 0
        assert asyncio.get_running_loop().time() - began < 0.05
        for handle in range(8):
            assert (await link.outcome(handle)).reason == pb.FINISH_REASON_EOS
        await worker.assert_clean()


async def test_a_deadline_fails_and_a_time_limit_finishes(make_worker: MakeWorker) -> None:
    async with make_worker(echo_step_ms=20) as worker:
        link = worker.link()
        await link.submit(1, range(10, 70), timeout_ms=150)
        await link.submit(2, range(10, 70), time_limit_ms=150)
        assert (await link.outcome(1)).failure.code == Code.DEADLINE_EXCEEDED
        assert (await link.outcome(2)).reason == pb.FINISH_REASON_TIME_LIMIT
        await worker.assert_clean()


GARBAGE = {
    "no command": pb.RunRequest(),
    "a handle of more than 32 bits": pb.RunRequest(submit=pb.Submit(handle=1 << 32)),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_a_senseless_command_ends_its_own_stream_alone(
    name: str, make_worker: MakeWorker
) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        good, bad = worker.link(), worker.link()
        await good.submit(1, [10, 11, 12])
        await bad.submit(1, range(10, 60), request_id="bad")
        await bad.until(lambda: bad[1].started == 1)
        await bad.call.write(GARBAGE[name])
        assert await bad.ending() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await good.outcome(1)).token_ids == [10, 11, 12]
        await worker.assert_clean()


async def test_a_live_handle_used_again_ends_its_stream(make_worker: MakeWorker) -> None:
    async with make_worker(echo_step_ms=10) as worker:
        link = worker.link()
        await link.submit(1, range(10, 60))
        await link.submit(1, [10], request_id="other")
        assert await link.ending() is grpc.StatusCode.INVALID_ARGUMENT
        await worker.assert_clean()


class GoneContext:
    """Of a call that has ended, though nobody has been told yet."""

    async def write(self, _: object) -> None:
        raise grpc.aio.InternalError("the call is over")


async def no_requests() -> AsyncIterator[pb.RunRequest]:
    await asyncio.Event().wait()
    yield pb.RunRequest()


async def test_a_write_that_meets_the_end_of_its_call_is_no_error_to_log() -> None:
    dispatcher = Dispatcher(
        lambda _: None, DispatcherLimits(8, 8), WorkerMetrics(CollectorRegistry())
    )
    service = WorkerService(dispatcher, ServedLimits(16, 8, "1"))
    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(service.Run(no_requests(), cast(Context, GoneContext())))
            # It opens its link as soon as it runs.
            await asyncio.sleep(0)
            assert dispatcher.num_links == 1
            dispatcher.on_event(Heartbeat(Load()))
            await asyncio.wait_for(run, 5)
    assert not dispatcher.num_links
    assert not [entry for entry in logs if entry["log_level"] == "error"]
