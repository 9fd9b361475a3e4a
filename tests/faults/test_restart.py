"""The worker is killed under many live streams, and comes back."""

import asyncio
import random

import grpc
import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.faults.field import Field
from tests.faults.ledger import Status
from tests.faults.load import ENDLESS_TOKENS, EOS, echo_request, endless_request
from tests.integration.pair import Client, Stream

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_STREAMS = 64
PROMPT_LEN = 100
# The others may wait in a queue.
NUM_BEGUN = 32


async def read_to_the_end(
    call: Stream, received: list[int], begun: asyncio.Semaphore
) -> tuple[grpc.StatusCode, str, int]:
    """Its status, what it says, and how many finishes came."""
    num_finished = 0
    try:
        while isinstance(event := await call.read(), pb.GenerateStreamResponse):
            if not received and event.delta.token_ids:
                begun.release()
            received += event.delta.token_ids
            received += event.finished.trailing_token_ids
            num_finished += event.HasField("finished")
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", num_finished
    return Status.OK, "", num_finished


async def test_each_of_64_streams_is_told_how_far_it_came_and_the_next_64_are_right(
    field: Field, rng: random.Random
) -> None:
    prompts = [[rng.randrange(1000, 20_000) for _ in range(PROMPT_LEN)] for _ in range(NUM_STREAMS)]
    received: list[list[int]] = [[] for _ in prompts]
    begun = asyncio.Semaphore(0)
    async with Client(field.street.address) as client, asyncio.TaskGroup() as tasks:
        reading = [
            tasks.create_task(read_to_the_end(client.stream(endless_request(prompt)), into, begun))
            for prompt, into in zip(prompts, received, strict=True)
        ]
        for _ in range(NUM_BEGUN):
            await begun.acquire()
        for worker in field.workers:
            worker.process.kill()
        endings = await asyncio.gather(*reading)
        for worker in field.workers:
            worker.process.wait()
        await field.settle()
        answers = await asyncio.gather(*(client.collect(echo_request(p)) for p in prompts))
    for prompt, into, (code, details, num_finished) in zip(prompts, received, endings, strict=True):
        assert code is Status.UNAVAILABLE
        assert num_finished == 0
        assert into == [*prompt, *[EOS] * ENDLESS_TOKENS][: len(into)]
        assert not into or f"after {len(into)} token" in details
    assert [answer.token_ids for answer in answers] == prompts
    await field.settle()
