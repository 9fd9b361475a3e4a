"""A fault inside the tokenizers library ends the request that met it, and nothing else.

The library's panics are no Exception; uncaught, they would leave the call without a status.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gateway.tokenizer import TemplateLimits, TokenizerFaultError, build_tokenizer, panics_as_errors
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway
from tests.gateway.synthetic_tokenizers import WORDS, metaspace_files

Status = grpc.StatusCode

# Takes a last "b" off, and panics where a text has no character at all.
FRAIL_DECODER = {
    "type": "Sequence",
    "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "b", "start": 0, "stop": 1}],
}
EMPTY_ID = 3 + 256 + len(WORDS)
A_ID = 3 + 256 + WORDS.index("a")


def frail_files(**changes: Any) -> dict[str, bytes]:
    """A vocabulary with an empty token, whose text the decoder panics on."""
    document = json.loads(metaspace_files(FRAIL_DECODER)["tokenizer.json"])
    document["model"]["vocab"][""] = EMPTY_ID
    return {"tokenizer.json": json.dumps(document | changes).encode()}


# Panics on every text.
FRAIL_ENCODER = {"type": "FixedLength", "length": 0}


def with_ids(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), **fields)


@pytest.mark.parametrize("num_completions", [1, 2])
async def test_a_panic_while_text_is_made_ends_its_request_alone(
    make_worker: MakeWorker, start_gateway: StartGateway, num_completions: int
) -> None:
    worker = make_worker(files=frail_files(), vocab_size=300)
    async with worker, start_gateway(worker) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.collect(with_ids(EMPTY_ID, A_ID, n=num_completions))
        assert caught.value.code() == Status.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.Generate(with_ids(EMPTY_ID), timeout=10)
        assert caught.value.code() == Status.INTERNAL
        assert (await gateway.collect(with_ids(A_ID, A_ID))).text == "aa"


async def test_a_panic_in_the_bytes_of_a_logprob_ends_its_request_alone(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    worker = make_worker(files=frail_files(), vocab_size=300)
    async with worker, start_gateway(worker) as gateway:
        for options in (pb.OutputOptions(logprobs=0), pb.OutputOptions(prompt_logprobs=0)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await gateway.collect(with_ids(A_ID, EMPTY_ID, output=options))
            assert caught.value.code() == Status.INTERNAL
            assert (await gateway.collect(with_ids(A_ID, A_ID, output=options))).text == "aa"


async def test_a_panic_of_a_plain_call_is_internal(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    worker = make_worker(files=frail_files(pre_tokenizer=FRAIL_ENCODER), vocab_size=300)
    async with worker, start_gateway(worker) as gateway:
        calls = [
            gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=[EMPTY_ID]), timeout=10),
            gateway.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=10),
            gateway.stub.Generate(text("a"), timeout=10),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == Status.INTERNAL
        answer = await gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=[A_ID]), timeout=10)
        assert answer.text == "a"
        assert (await gateway.collect(with_ids(A_ID))).text == "a"


def test_every_way_to_the_library_tells_its_panics_as_errors() -> None:
    tokenizer = build_tokenizer(frail_files(pre_tokenizer=FRAIL_ENCODER), 300, TemplateLimits())
    ways: list[Callable[[], object]] = [
        lambda: tokenizer.encode("a", add_special_tokens=False),
        lambda: tokenizer.decode([EMPTY_ID], skip_special_tokens=True),
        lambda: tokenizer.token_bytes(EMPTY_ID),
        lambda: tokenizer.detokenizer(skip_special_tokens=True).feed(EMPTY_ID),
    ]
    for way in ways:
        with pytest.raises(TokenizerFaultError):
            way()
    assert tokenizer.decode([A_ID], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_ends_a_task_or_the_process_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as_errors():
        raise error
