"""What a request asks for reaches the worker, every field of it."""

from typing import Any

import grpc
import pytest

from gateway.tokenizer import TextTokenizer
from shared.errors import Code
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2
from tests.answers import collect, violated_fields
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet

Structure = worker_pb2.StructuredOutput


async def submitted(
    make_worker: MakeWorker, start_gateway: StartGateway, request: pb.GenerateRequest
) -> worker_pb2.Submit:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await gateway.collect(request)
    return worker.requests[0].submit


async def test_sampling_and_stops_are_sent_as_they_were_asked_for(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    submit = await submitted(
        make_worker,
        start_gateway,
        text(
            "hi",
            sampling=pb.SamplingParams(
                min_p=0.5,
                repetition_penalty=1.25,
                frequency_penalty=-2,
                presence_penalty=2,
                logit_bias={7: -100, 5: 1.5},
                allowed_token_ids=[9, 5, 9],
            ),
            stopping=pb.StopConditions(min_tokens=3, stop_token_ids=[11]),
            output=pb.OutputOptions(logprobs=0),
            priority=-3,
        ),
    )
    sampling = submit.sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.5, 1.25)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2, 2)
    assert dict(sampling.logit_bias) == {5: 1.5, 7: -100}
    assert list(sampling.allowed_token_ids) == [9, 5]
    assert (submit.min_tokens, list(submit.stop_token_ids), submit.priority) == (3, [11], -3)
    assert submit.HasField("logprobs") and submit.logprobs == 0
    assert not submit.HasField("prompt_logprobs")
    assert not submit.HasField("structured_output")


STRUCTURES: dict[str, tuple[dict[str, Any], worker_pb2.StructuredOutput]] = {
    "schema": (
        {"json_schema": '{"type": "object"}'},
        Structure(kind=Structure.KIND_JSON_SCHEMA, text='{"type": "object"}'),
    ),
    "any object": ({"json_object": True}, Structure(kind=Structure.KIND_JSON_OBJECT)),
    "regex": ({"regex": "a+"}, Structure(kind=Structure.KIND_REGEX, text="a+")),
    "grammar": (
        {"grammar": 'root ::= "a"'},
        Structure(kind=Structure.KIND_GRAMMAR, text='root ::= "a"'),
    ),
    "choice": (
        {"choice": pb.ChoiceList(choices=["yes", "no"])},
        Structure(kind=Structure.KIND_CHOICE, choices=["yes", "no"]),
    ),
}


@pytest.mark.parametrize("case", STRUCTURES)
async def test_a_structure_is_sent_in_its_kind(
    make_worker: MakeWorker, start_gateway: StartGateway, case: str
) -> None:
    fields, expected = STRUCTURES[case]
    request = text("hi", structured_output=pb.StructuredOutput(**fields))
    submit = await submitted(make_worker, start_gateway, request)
    assert submit.structured_output == expected


async def test_what_the_worker_says_of_a_grammar_names_its_field(quiet: StartQuiet) -> None:
    request = text("hi", structured_output=pb.StructuredOutput(regex="a("))
    async with quiet() as pair:
        call, received = await pair.stream(request)
        field = "structured_output.regex"
        received.fail(Code.INVALID_ARGUMENT, f"{field}: missing )", field=field)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(caught.value) == [field]


async def test_the_end_of_a_long_prompt_is_kept(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    long = " ".join(f"word{i}" for i in range(400))
    ids = served.encode(long, add_special_tokens=True)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=long)])
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answers = [
            await gateway.collect(request)
            for request in (
                text(long, truncate_prompt_tokens=7, max_tokens=2),
                pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=ids), truncate_prompt_tokens=7, max_tokens=2
                ),
                pb.GenerateRequest(chat=chat, truncate_prompt_tokens=7, max_tokens=2),
            )
        ]
    of_text, of_ids, of_chat = (list(r.submit.prompt_token_ids) for r in worker.requests)
    assert len(ids) > worker.model.max_context_tokens
    assert of_text == of_ids == ids[-7:]
    assert served.decode(of_chat, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert len(of_chat) == 7
    assert [answer.started.prompt_tokens for answer in answers] == [7, 7, 7]
    assert [answer.finished.usage.prompt_tokens for answer in answers] == [7, 7, 7]


async def test_a_prompt_that_is_shorter_is_kept_whole(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    submit = await submitted(make_worker, start_gateway, text("hi", truncate_prompt_tokens=9))
    assert list(submit.prompt_token_ids) == served.encode("hi", add_special_tokens=True)
