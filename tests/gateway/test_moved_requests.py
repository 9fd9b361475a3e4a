"""Which requests a second worker is asked for, and what is told of those."""

import grpc

from gateway.tokenizer import TextTokenizer
from shared.errors import Code
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect
from tests.gateway.client import error_of, text
from tests.gateway.conftest import StartQuiet, StartQuietTwo

Status = grpc.StatusCode


async def test_a_request_without_a_token_moves_to_another_worker(quiet_two: StartQuietTwo) -> None:
    async with quiet_two() as two:
        call, first, second = await two.stream()
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
    quiet_two: StartQuietTwo, served: TextTokenizer
) -> None:
    stopping = pb.StopConditions(stop_strings=["STOP"])
    async with quiet_two() as two:
        call, first, second = await two.stream(text("x y z", stopping=stopping))
        first.requests[0].start(cached_tokens=2)
        await call.read()
        await first.crash()
        request = await second.request()
        request.start(cached_tokens=1)
        request.send_tokens(served.encode("STOP", add_special_tokens=False))
        finished = (await call.read()).finished
        assert finished.stop_string == "STOP"
        assert finished.usage.cached_tokens == 1
        assert await call.read() is grpc.aio.EOF


async def test_a_refusal_as_unavailable_is_tried_elsewhere(quiet_two: StartQuietTwo) -> None:
    async with quiet_two() as two:
        call, first, second = await two.stream()
        first.requests[0].reject(Code.UNAVAILABLE, "draining")
        request = await second.request()
        request.start()
        request.send_tokens([100])
        request.finish()
        assert (await collect(call)).token_ids == [100]
        assert two.num_requests == [1, 1]


async def test_a_refusal_by_a_full_queue_is_tried_where_there_may_be_room(
    quiet_two: StartQuietTwo,
) -> None:
    async with quiet_two() as two:
        call, first, second = await two.stream()
        first.requests[0].reject(Code.RESOURCE_EXHAUSTED, "full", retry_after_ms=1000)
        (await second.request()).reject(Code.RESOURCE_EXHAUSTED, "full too", retry_after_ms=2000)
        assert (await error_of(call, saying="full too")).code() == Status.RESOURCE_EXHAUSTED
        assert two.num_requests == [1, 1]


async def test_any_other_refusal_is_final(quiet_two: StartQuietTwo) -> None:
    async with quiet_two() as two:
        call, first, _ = await two.stream()
        first.requests[0].reject(Code.RESOURCE_EXHAUSTED, "full")
        assert await call.code() == Status.RESOURCE_EXHAUSTED
        assert sum(two.num_requests) == 1


async def test_when_every_worker_was_tried_the_last_reason_is_told(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream()
        request.reject(Code.UNAVAILABLE, "draining now")
        assert (await error_of(call, saying="draining now")).code() == Status.UNAVAILABLE
