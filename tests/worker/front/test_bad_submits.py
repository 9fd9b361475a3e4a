"""Each wrong or unserved field of a Submit is refused by its public path; the next works."""

import math
from typing import Any

import pytest

from shared.errors import Code
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.worker.front.conftest import MakeWorker
from tests.worker.front.harness import FrontWorker, neutral_sampling

INVALID: dict[str, tuple[str, dict[str, Any]]] = {
    "no request id": ("request_id", {"request_id": ""}),
    "a request id of 129 bytes": ("request_id", {"request_id": "x" * 129}),
    "an empty prompt": ("prompt", {"prompt": []}),
    "a prompt as long as the context": ("prompt", {"prompt": [5] * 128, "max_tokens": 1}),
    "a prompt longer than the context": ("prompt", {"prompt": [5] * 1000}),
    "a token id past the vocabulary": ("prompt", {"prompt": [5, 1000]}),
    "the largest token id": ("prompt", {"prompt": [2**32 - 1]}),
    "no tokens to sample": ("max_tokens", {"max_tokens": 0}),
    "more tokens than the context": ("max_tokens", {"max_tokens": 2**32 - 1}),
    "a stop token past the vocabulary": ("stopping.stop_token_ids", {"stop_token_ids": [1000]}),
    "more min_tokens than max_tokens": ("stopping.min_tokens", {"min_tokens": 65}),
    "a ninth completion": ("n", {"index": 8}),
    "21 likeliest tokens": ("output.logprobs", {"logprobs": 21}),
    "21 likeliest tokens of the prompt": ("output.prompt_logprobs", {"prompt_logprobs": 21}),
    "a bias past the vocabulary": (
        "sampling.logit_bias",
        {"sampling": neutral_sampling(logit_bias={1000: 1.0})},
    ),
    "1025 biases": (
        "sampling.logit_bias",
        {"sampling": neutral_sampling(logit_bias={i: 1.0 for i in range(1025)})},
    ),
    "an allowed id past the vocabulary": (
        "sampling.allowed_token_ids",
        {"sampling": neutral_sampling(allowed_token_ids=[5, 1000])},
    ),
    "allowed ids that end it before min_tokens": (
        "sampling.allowed_token_ids",
        {"sampling": neutral_sampling(allowed_token_ids=[2, 5]), "stop_token_ids": [5]}
        | {"min_tokens": 1},
    ),
}
for _bias in (100.5, -100.5, math.nan, math.inf):
    INVALID[f"a bias of {_bias}"] = (
        "sampling.logit_bias",
        {"sampling": neutral_sampling(logit_bias={5: _bias})},
    )
INVALID_SAMPLING: dict[str, float] = {
    "temperature": -1,
    "top_p": 1.5,
    "min_p": -0.1,
    "repetition_penalty": 0,
    "frequency_penalty": 2.5,
    "presence_penalty": -2.5,
}
for _name, _value in INVALID_SAMPLING.items():
    for _bad in (_value, math.nan, math.inf):
        INVALID[f"{_name} {_bad}"] = (
            f"sampling.{_name}",
            {"sampling": neutral_sampling(**{_name: _bad})},
        )


async def test_each_invalid_value_is_refused_with_its_field(worker: FrontWorker) -> None:
    link = worker.link()
    for handle, (name, (field, fields)) in enumerate(INVALID.items()):
        await link.submit(handle, **fields)
        failure = (await link.outcome(handle)).failure
        assert (failure.code, failure.field) == (Code.INVALID_ARGUMENT, field), name
        assert failure.message.startswith(f"{field}: "), name
    await worker.assert_next_works()


async def test_structured_output_is_unimplemented_on_an_engine_without_logits(
    worker: FrontWorker,
) -> None:
    link = worker.link()
    rule = pb.StructuredOutput(kind=pb.StructuredOutput.KIND_JSON_OBJECT)
    await link.submit(1, structured_output=rule)
    failure = (await link.outcome(1)).failure
    assert (failure.code, failure.field) == (Code.UNIMPLEMENTED, "structured_output")
    await worker.assert_next_works()


async def test_an_over_long_prompt_is_told_the_limit(worker: FrontWorker) -> None:
    link = worker.link()
    await link.submit(1, [5] * 128)
    failure = (await link.outcome(1)).failure
    assert "128" in failure.message and "127" in failure.message


async def test_the_longest_prompt_gives_exactly_one_token(worker: FrontWorker) -> None:
    link = worker.link()
    await link.submit(1, [5] * 127, max_tokens=1)
    outcome = await link.outcome(1)
    assert outcome.token_ids == [5]
    assert outcome.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("top_k", [0, 1, 10**9, 2**32 - 1])
async def test_every_top_k_that_the_field_can_hold_is_served(
    top_k: int, worker: FrontWorker
) -> None:
    link = worker.link()
    await link.submit(1, sampling=neutral_sampling(top_k=top_k, temperature=2, seed=2**64 - 1))
    assert (await link.outcome(1)).token_ids == [10, 11, 12]


async def test_requests_before_the_model_is_ready_are_unavailable(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(target=never_ready, wait_serving=False) as worker:
        link = worker.link()
        await link.submit(1)
        failure = (await link.outcome(1)).failure
        assert failure.code == Code.UNAVAILABLE
        assert failure.retry_after_ms > 0
        assert not (await worker.load()).ready


def never_ready(config: object, parent_pid: int, connection: Any) -> None:
    """An engine process that loads for ever."""
    connection.poll(60)
