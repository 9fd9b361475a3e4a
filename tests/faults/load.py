"""Clients that send random requests, read in random ways, and note what became of each."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum

import grpc

from shared.grpc_options import channel_options
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.tasks import TaskSet
from tests.faults.ledger import Ledger, Status

# Every request has a deadline; one that has not ended this long after it hangs.
DEADLINE_S = 20.0
HANG_MARGIN_S = 5.0
# At two milliseconds a step these are five seconds.
ENDLESS_TOKENS = 2500
EOS = 2
_PAUSE_AFTER_FAILURE_S = 0.03
_CONNECTIONS = 4


class Manner(StrEnum):
    """How a client goes about a request."""

    TO_THE_END = "reads to the end"
    UNARY = "asks once"
    LEAVES = "cancels amid it"
    HURRIES = "has a short deadline"
    DAWDLES = "reads slowly"


_WEIGHTS = {
    Manner.TO_THE_END: 8,
    Manner.UNARY: 3,
    Manner.LEAVES: 4,
    Manner.HURRIES: 2,
    Manner.DAWDLES: 1,
}


def random_prompt(rng: random.Random, most: int = 200) -> list[int]:
    """Few different beginnings, so that prompts share prefixes."""
    return [1000 + rng.randrange(4)] * rng.randint(1, 40) + [
        rng.randrange(1000, 20_000) for _ in range(rng.randint(1, most))
    ]


def endless_request(prompt: list[int]) -> pb.GenerateRequest:
    """Its answer is the prompt and then eos for seconds on end: one that nobody waits for and
    that runs on all the same is seen."""
    request = echo_request(prompt)
    request.max_tokens = ENDLESS_TOKENS
    request.stopping.ignore_eos = True
    return request


def echo_request(prompt: list[int]) -> pb.GenerateRequest:
    """Its answer is the prompt."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        max_tokens=len(prompt) + 1,
        output=pb.OutputOptions(skip_special_tokens=False),
    )


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[list[pb_grpc.InferenceServiceStub]]:
    """Stubs over several connections of their own."""
    options = channel_options(own_connection=True, max_reconnect_backoff_ms=200)
    async with AsyncExitStack() as stack:
        yield [
            pb_grpc.InferenceServiceStub(
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
            )
            for _ in range(_CONNECTIONS)
        ]


@asynccontextmanager
async def load(
    address: str, ledger: Ledger, rng: random.Random, num_clients: int
) -> AsyncIterator[None]:
    """Keeps the clients busy for as long as the block lasts, and then waits for their endings."""
    stop = asyncio.Event()
    async with connected(address) as stubs, TaskSet() as tasks:
        clients = [
            tasks.start(
                _client(stubs[i % len(stubs)], ledger, random.Random(rng.random()), stop),
                name=f"client {i}",
            )
            for i in range(num_clients)
        ]
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait(clients)
        for client in clients:
            client.result()


async def _client(
    stub: pb_grpc.InferenceServiceStub, ledger: Ledger, rng: random.Random, stop: asyncio.Event
) -> None:
    manners, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    while not stop.is_set():
        (manner,) = rng.choices(manners, weights)
        if not await send(stub, manner, ledger, rng):
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)


async def send(
    stub: pb_grpc.InferenceServiceStub, manner: Manner, ledger: Ledger, rng: random.Random
) -> bool:
    """One request to its one ending; whether it was OK."""
    deadline_s = rng.uniform(0.005, 0.3) if manner is Manner.HURRIES else DEADLINE_S
    prompt = random_prompt(rng)
    try:
        async with asyncio.timeout(deadline_s + HANG_MARGIN_S):
            if manner is Manner.UNARY:
                return await _ask(stub, prompt, ledger, deadline_s)
            return await _stream(stub, prompt, manner, ledger, rng, deadline_s)
    except TimeoutError:
        ledger.end("HUNG", f"a request that {manner} had no ending {HANG_MARGIN_S} s late")
        return False


async def _ask(
    stub: pb_grpc.InferenceServiceStub, prompt: list[int], ledger: Ledger, deadline_s: float
) -> bool:
    try:
        answer = await stub.Generate(echo_request(prompt), timeout=deadline_s)
    except grpc.aio.AioRpcError as error:
        ledger.end(_ending(error, Manner.UNARY), error.details() or "")
        return False
    (completion,) = answer.completions
    received = [*completion.token_ids, *completion.finished.trailing_token_ids]
    ledger.check_echo(prompt, received, whole=True)
    ledger.end("OK")
    return True


async def _stream(
    stub: pb_grpc.InferenceServiceStub,
    prompt: list[int],
    manner: Manner,
    ledger: Ledger,
    rng: random.Random,
    deadline_s: float,
) -> bool:
    if manner in (Manner.LEAVES, Manner.HURRIES):
        call = stub.GenerateStream(endless_request(prompt), timeout=deadline_s)
        prompt = prompt + [EOS] * (ENDLESS_TOKENS - len(prompt))
    else:
        call = stub.GenerateStream(echo_request(prompt), timeout=deadline_s)
    most_events = rng.randrange(6) if manner is Manner.LEAVES else 1 << 30
    received: list[int] = []
    num_events = num_finished = 0
    try:
        while num_events < most_events:
            event = await call.read()
            if not isinstance(event, pb.GenerateStreamResponse):
                break
            num_events += 1
            if num_finished:
                ledger.violate(f"a {event.WhichOneof('event')} after the finish")
            received += event.delta.token_ids
            if event.HasField("finished"):
                num_finished += 1
                received += event.finished.trailing_token_ids
            if manner is Manner.DAWDLES and num_events < 30:
                await asyncio.sleep(0.01)
    except grpc.aio.AioRpcError as error:
        return _broken(error, _ending(error, manner), prompt, received, num_finished, ledger)
    finally:
        call.cancel()
    ledger.check_echo(prompt, received, whole=bool(num_finished))
    if num_events >= most_events:
        ledger.end("CANCELLED")
    elif not num_finished:
        ledger.end("UNFINISHED", "a stream ended OK without its finish")
    else:
        ledger.end("OK")
    return True


def _ending(error: grpc.aio.AioRpcError, manner: Manner) -> str:
    """Its status; late, where nothing but the deadline ended a request that had time enough."""
    is_late = error.code() is Status.DEADLINE_EXCEEDED and manner is not Manner.HURRIES
    return "LATE" if is_late else error.code().name


def _broken(
    error: grpc.aio.AioRpcError,
    ending: str,
    prompt: list[int],
    received: list[int],
    num_finished: int,
    ledger: Ledger,
) -> bool:
    ledger.check_echo(prompt, received, whole=bool(num_finished))
    if num_finished:
        # The connection broke between the finish and the status: the client has its answer.
        ledger.end("OK")
        return True
    if error.code() is Status.CANCELLED:
        # Nobody here cancels a call that it still reads.
        ledger.violate(f"cancelled by the server: {error.details()}")
    ledger.end(ending, error.details() or "")
    return False
