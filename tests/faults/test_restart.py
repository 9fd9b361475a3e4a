"""The worker is killed under many live streams, and comes back."""

import asyncio
import random

import grpc
import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.faults.field import Field
from tests.faults.ledger import Status
from tests.faults.load import echo_request
from tests.integration.pair import Client, Stream

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_STREAMS = 64
PROMPT_LEN = 100
# So many that none ends before the last has begun.
MAX_TOKENS = 600
EOS = 2


def long_request(prompt: list[int]) -> pb.GenerateRequest:
    """Its answer is the prompt and then eos, again and again."""
    request = echo_request(prompt)
    request.max_tokens = MAX_TOKENS
    request.stopping.ignore_eos = True
    return request


async def read_to_the_end(
    call: Stream, received: list[int], has_begun: asyncio.Event
) -> tuple[grpc.StatusCode, str, int]:
    """Its status, what it says, and how many finishes came."""
    num_finished = 0
    try:
        while isinstance(event := await call.read(), pb.GenerateStreamResponse):
            received += event.delta.token_ids
            received += event.finished.trailing_token_ids
            num_finished += event.HasField("finished")
            if received:
                has_begun.set()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", num_finished
    return Status.OK, "", num_finished


async def test_each_of_64_streams_is_told_how_far_it_came_and_the_next_64_are_right(
    field: Field, rng: random.Random
) -> None:
    prompts = [[rng.randrange(1000, 20_000) for _ in range(PROMPT_LEN)] for _ in range(NUM_STREAMS)]
    received: list[list[int]] = [[] for _ in prompts]
    begun = [asyncio.Event() for _ in prompts]
    async with Client(field.street.address) as client, asyncio.TaskGroup() as tasks:
        reading = [
            tasks.create_task(read_to_the_end(client.stream(long_request(prompt)), into, event))
            for prompt, into, event in zip(prompts, received, begun, strict=True)
        ]
        # As many as run at once.
        await asyncio.gather(*(event.wait() for event in begun))
        for worker in field.workers:
            worker.process.kill()
        endings = await asyncio.gather(*reading)
        for worker in field.workers:
            worker.process.wait()
        await field.settle()
        answers = await asyncio.gather(*(client.collect(long_request(p)) for p in prompts))
    whole = [prompt + [EOS] * (MAX_TOKENS - PROMPT_LEN) for prompt in prompts]
    for expected, into, (code, details, num_finished) in zip(whole, received, endings, strict=True):
        assert code is Status.UNAVAILABLE
        assert num_finished == 0
        assert into == expected[: len(into)]
        assert f"after {len(into)} token" in details
    assert [answer.token_ids for answer in answers] == whole
    await field.settle()
