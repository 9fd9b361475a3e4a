"""Tokens that go to their client without the request's task: all of them, in order, or an error."""

import asyncio
import random
from typing import Any

import grpc
import pytest

from gateway.stream_writer import stream_writer
from shared.notifier import Notifier
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2
from tests.gateway.client import text
from tests.gateway.conftest import StartQuiet
from tests.gateway.fake_worker import Received
from tests.gateway.quiet import Quiet

Status = grpc.StatusCode


async def begun(pair: Quiet) -> tuple[Any, Received]:
    """A stream whose first token its client has, so that the others take the short way."""
    call, request = await pair.begun(text("x", max_tokens=200))
    assert (await call.read()).HasField("started")
    assert list((await call.read()).delta.token_ids) == [100]
    return call, request


async def rest_of(call: Any) -> tuple[list[int], pb.Finished]:
    token_ids: list[int] = []
    while not (response := await call.read()).HasField("finished"):
        token_ids += response.delta.token_ids
    assert await call.read() is grpc.aio.EOF
    return token_ids + list(response.finished.trailing_token_ids), response.finished


async def test_a_token_that_no_vocabulary_has_ends_its_own_stream_alone(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        bad, bad_request = await begun(pair)
        good, good_request = await begun(pair)
        handles = [bad_request.submit.handle, good_request.submit.handle]
        bad_request.send_output(worker_pb2.StepOutput(handles=handles, token_ids=[1 << 30, 101]))
        assert await bad.code() == Status.INTERNAL
        assert await pair.abort_replies(bad_request) == [False]
        good_request.finish()
        assert (await rest_of(good))[0] == [101]


async def test_tokens_of_merged_steps_come_in_order(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await begun(pair)
        handle = request.submit.handle
        request.send_output(
            worker_pb2.StepOutput(
                handles=[handle, 999, handle, handle], token_ids=[101, 7, 102, 103]
            )
        )
        request.finish()
        assert (await rest_of(call))[0] == [101, 102, 103]


async def test_an_abort_between_tokens_ends_the_stream_ok(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await begun(pair)
        request.send_tokens([101])
        request.finish(worker_pb2.FINISH_REASON_ABORTED)
        token_ids, finished = await rest_of(call)
    assert token_ids == [101]
    assert finished.finish_reason == pb.FINISH_REASON_ABORTED


async def test_a_worker_lost_between_tokens_says_how_far_it_came(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await begun(pair)
        request.send_tokens([101])
        assert list((await call.read()).delta.token_ids) == [101]
        await pair.worker.crash()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == Status.UNAVAILABLE
    assert "after 2 tokens" in (caught.value.details() or "")


async def test_random_steps_reach_every_client_whole(quiet: StartQuiet) -> None:
    choices = random.Random(5)
    async with quiet() as pair, asyncio.TaskGroup() as tasks:
        streams = [await begun(pair) for _ in range(16)]
        sent: list[list[int]] = [[] for _ in streams]
        answers = [tasks.create_task(rest_of(call)) for call, _ in streams]
        for _ in range(300):
            output = worker_pb2.StepOutput(committed_unix_us=choices.choice([0, 1]))
            for index in choices.choices(range(len(streams)), k=choices.randrange(1, 24)):
                # Of these, some are parts of characters.
                token_id = choices.randrange(3, 400)
                output.handles.append(streams[index][1].submit.handle)
                output.token_ids.append(token_id)
                sent[index].append(token_id)
            streams[0][1].send_output(output)
            if choices.random() < 0.2:
                await asyncio.sleep(0.002)
        for index, (_, request) in enumerate(streams):
            request.num_sent = 1 + len(sent[index])
            request.finish()
        ends = await asyncio.gather(*answers)
    assert [token_ids for token_ids, _ in ends] == sent
    assert [end.usage.completion_tokens for _, end in ends] == [1 + len(ids) for ids in sent]


class GatedContext:
    """A client's stream whose writes end when a test says so."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.gates: list[asyncio.Event] = []
        self._changed = Notifier()

    async def has_begun(self, message: Any) -> None:
        await self._changed.until(lambda: message in self.begun)

    async def write(self, message: Any) -> None:
        self.begun.append(message)
        gate = asyncio.Event()
        self.gates.append(gate)
        self._changed.notify()
        await gate.wait()
        if message == "bad":
            raise ConnectionError("the client is gone")


async def test_a_write_that_a_callback_began_is_over_before_the_next() -> None:
    context = GatedContext()
    async with stream_writer(context, 30) as writer, asyncio.TaskGroup() as tasks:
        writer.begin("first")
        assert context.begun == ["first"]
        assert not writer.is_free
        free = asyncio.Event()
        writer.when_free(free.set)
        second = tasks.create_task(writer.write("second"))
        context.gates[0].set()
        await free.wait()
        await context.has_begun("second")
        context.gates[1].set()
        await second
        assert writer.is_free
    assert context.begun == ["first", "second"]


async def test_a_write_that_fails_is_told_to_whoever_asks_next() -> None:
    context = GatedContext()
    async with stream_writer(context, 30) as writer:
        writer.begin("bad")
        context.gates[0].set()
        with pytest.raises(ConnectionError):
            await writer.drain()
        assert writer.is_free


async def test_a_write_goes_on_to_its_end_when_its_stream_is_closed() -> None:
    over = asyncio.Event()

    class Noting(GatedContext):
        async def write(self, message: Any) -> None:
            await super().write(message)
            over.set()

    context = Noting()
    async with stream_writer(context, 30) as writer:
        writer.begin("last")
    assert not over.is_set()
    context.gates[0].set()
    async with asyncio.timeout(5):
        await over.wait()
