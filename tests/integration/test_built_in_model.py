"""Options that change or tell what a real model says, on the built-in one."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import Collected, collect_all, violated_fields
from tests.integration.conftest import BUILT_IN, StartPair
from tests.integration.pair import Client, Pair

GREEDY = pb.SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def pair(start_pair: StartPair) -> Iterator[Pair]:
    args = ("--engine", "cpu", "--model", BUILT_IN, "--max-context", "256", "--max-running", "8")
    with start_pair((*args, "--token-budget", "32")) as pair:
        yield pair


@pytest.fixture
async def model(pair: Pair) -> AsyncIterator[Client]:
    async with Client(pair.address) as client:
        yield client
        await client.assert_clean()


def chat(content: str, max_tokens: int = 16, **fields: Any) -> pb.GenerateRequest:
    prompt = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=content)])
    return pb.GenerateRequest(chat=prompt, max_tokens=max_tokens, **fields)


def values(places: list[pb.TokenLogprobs]) -> list[tuple[int, float]]:
    return [(place.chosen.token_id, place.chosen.logprob) for place in places]


async def capital(model: Client, **fields: Any) -> Collected:
    return await model.collect(chat("What is the capital of France?", sampling=GREEDY, **fields))


async def test_greedy_tokens_are_the_likeliest(model: Client) -> None:
    answer = await capital(model, output=pb.OutputOptions(logprobs=5))
    assert "Paris" in answer.text
    assert [place.chosen.token_id for place in answer.logprobs] == answer.token_ids
    for place in answer.logprobs:
        assert place.chosen.rank == 1
        assert place.top[0] == place.chosen
        assert [top.rank for top in place.top] == [1, 2, 3, 4, 5]
        probabilities = [math.exp(top.logprob) for top in place.top]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) <= 1 + 1e-5
    read = b"".join(place.chosen.token_bytes for place in answer.logprobs)
    assert read.decode() == answer.text


async def test_a_prompts_logprobs_are_the_same_whatever_is_cached(model: Client) -> None:
    output = pb.OutputOptions(prompt_logprobs=2)
    cold = await capital(model, output=output)
    without = await capital(model)
    warm = await capital(model, output=output)
    assert without.started.cached_tokens > 0
    assert warm.started.cached_tokens == 0
    # More than the token budget, so they come from several chunks.
    assert len(warm.started.prompt_logprobs) == warm.started.prompt_tokens - 1 > 32
    for one, other in zip(
        values(list(cold.started.prompt_logprobs)),
        values(list(warm.started.prompt_logprobs)),
        strict=True,
    ):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-4)
    assert cold.token_ids == warm.token_ids == without.token_ids


async def test_logprobs_are_the_models_own(model: Client) -> None:
    plain = await capital(model, max_tokens=1, output=pb.OutputOptions(logprobs=20))
    runner_up = plain.logprobs[0].top[1]
    biased = await model.collect(
        chat(
            "What is the capital of France?",
            max_tokens=1,
            sampling=pb.SamplingParams(temperature=0, logit_bias={runner_up.token_id: 100}),
            output=pb.OutputOptions(logprobs=0),
        )
    )
    (place,) = biased.logprobs
    assert place.chosen.token_id == runner_up.token_id
    assert place.chosen.rank == 2
    assert place.chosen.logprob == pytest.approx(runner_up.logprob, abs=1e-4)


async def test_penalties_keep_a_model_from_repeating_itself(model: Client) -> None:
    allowed = list(range(1000, 1040))

    async def num_different(**penalties: float) -> int:
        sampling = pb.SamplingParams(temperature=0, allowed_token_ids=allowed, **penalties)  # type: ignore[arg-type]
        answer = await model.collect(chat("Go on", max_tokens=40, sampling=sampling))
        assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH
        assert set(answer.token_ids) <= set(allowed)
        return len(set(answer.token_ids))

    free = await num_different()
    assert await num_different(frequency_penalty=2) > free
    assert await num_different(repetition_penalty=1.5) > free


async def test_each_completion_is_what_its_seed_alone_gives(model: Client) -> None:
    sampling = pb.SamplingParams(temperature=1, top_k=50, min_p=0.01, seed=2**64 - 1)
    request = chat("Tell me a story", max_tokens=12, n=3, sampling=sampling)
    answers = await collect_all(model.stream(request))
    assert [answer.finished.seed for answer in answers] == [2**64 - 1, 0, 1]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    for answer in answers:
        request.n = 1
        request.sampling.seed = answer.finished.seed
        alone = await model.collect(request)
        assert alone.token_ids == answer.token_ids


async def test_no_eos_comes_before_min_tokens(model: Client) -> None:
    short = await capital(model, max_tokens=60)
    assert short.finished.WhichOneof("matched") == "eos_token_id"
    min_tokens = short.finished.usage.completion_tokens + 5
    longer = await capital(model, max_tokens=60, stopping=pb.StopConditions(min_tokens=min_tokens))
    assert longer.finished.usage.completion_tokens >= min_tokens
    assert short.finished.eos_token_id not in longer.token_ids
    assert longer.token_ids[: len(short.token_ids)] == short.token_ids


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES = {
    "schema": pb.StructuredOutput(json_schema=json.dumps(PERSON)),
    "regex": pb.StructuredOutput(regex="[A-Z][a-z]{2,5}, [0-9]{2}"),
    "grammar": pb.StructuredOutput(grammar='root ::= "<" ("a" | "b")+ ">"'),
    "choice": pb.StructuredOutput(choice=pb.ChoiceList(choices=["Lyon", "Nice 😀"])),
}


def obeys(name: str, text: str) -> bool:
    match name:
        case "schema":
            person = json.loads(text)
            return set(person) == {"name", "age"} and 0 <= person["age"] <= 120
        case "regex":
            return re.fullmatch("[A-Z][a-z]{2,5}, [0-9]{2}", text) is not None
        case "grammar":
            return re.fullmatch("<[ab]+>", text) is not None
        case _:
            return text in ("Lyon", "Nice 😀")


@pytest.mark.parametrize("name", STRUCTURES)
async def test_an_output_obeys_its_structure_beside_free_ones(model: Client, name: str) -> None:
    sampling = pb.SamplingParams(temperature=1, seed=5)
    request = chat("Who is it?", max_tokens=60, n=2, sampling=sampling)
    request.structured_output.CopyFrom(STRUCTURES[name])
    request.output.logprobs = 1
    answers, free = await asyncio.gather(collect_all(model.stream(request)), capital(model))
    for answer in answers:
        assert [place.chosen.token_id for place in answer.logprobs] == answer.token_ids
        # The letters of a grammar may go on until max_tokens.
        if answer.finished.finish_reason == pb.FINISH_REASON_STOP:
            assert answer.finished.WhichOneof("matched") == "eos_token_id"
            assert obeys(name, answer.text), answer.text
    assert any(a.finished.finish_reason == pb.FINISH_REASON_STOP for a in answers)
    assert "Paris" in free.text


@pytest.mark.parametrize(
    ("structure", "field"),
    [
        (pb.StructuredOutput(regex="a("), "structured_output.regex"),
        (pb.StructuredOutput(grammar="root ::= nothing"), "structured_output.grammar"),
        (pb.StructuredOutput(json_schema='{"type": "x"}'), "structured_output.json_schema"),
    ],
)
async def test_a_structure_that_does_not_compile_is_named(
    model: Client, structure: pb.StructuredOutput, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await model.collect(chat("x", structured_output=structure))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    assert violated_fields(caught.value) == [field]
