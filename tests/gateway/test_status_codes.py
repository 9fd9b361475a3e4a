"""Each refusal has its status and names its field; after each, the next request works."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import violated_fields
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker, StartGateway

Status = grpc.StatusCode

REFUSING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


# One gateway for all: that the next request works is part of each test.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    make_worker: MakeWorker, start_gateway: StartGateway, served_files: dict[str, bytes]
) -> AsyncIterator[GatewayUnderTest]:
    files = {**served_files, "chat_template.jinja": REFUSING_TEMPLATE.encode()}
    async with make_worker(files=files) as worker, start_gateway(worker) as gateway:
        yield gateway


async def refused(gateway: GatewayUnderTest, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error of a request that must fail; then a good request must still work."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.collect(request)
    assert (await gateway.collect(text("still here"))).text == "still here"
    return caught.value


def sampling(**fields: Any) -> pb.GenerateRequest:
    return text("x", sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return text("x", stopping=pb.StopConditions(**fields))


def structured(**fields: Any) -> pb.GenerateRequest:
    return text("x", structured_output=pb.StructuredOutput(**fields))


def choice(*choices: str) -> pb.GenerateRequest:
    return structured(choice=pb.ChoiceList(choices=choices))


def output(**fields: Any) -> pb.GenerateRequest:
    return text("x", output=pb.OutputOptions(**fields))


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.GenerateRequest:
    messages = messages or (pb.ChatMessage(role="user", content="hi"),)
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, **fields))


def ids(*token_ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids))


INVALID: dict[str, tuple[pb.GenerateRequest, str]] = {
    "temperature below 0": (sampling(temperature=-1), "sampling.temperature"),
    "temperature nan": (sampling(temperature=math.nan), "sampling.temperature"),
    "temperature inf": (sampling(temperature=math.inf), "sampling.temperature"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p"),
    "top_p nan": (sampling(top_p=math.nan), "sampling.top_p"),
    "top_p above 1": (sampling(top_p=1.5), "sampling.top_p"),
    "top_k below -1": (sampling(top_k=-2), "sampling.top_k"),
    "min_p above 1": (sampling(min_p=1.5), "sampling.min_p"),
    "min_p below 0": (sampling(min_p=-0.1), "sampling.min_p"),
    "min_p nan": (sampling(min_p=math.nan), "sampling.min_p"),
    "repetition_penalty 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    "frequency_penalty 3": (sampling(frequency_penalty=3), "sampling.frequency_penalty"),
    "presence_penalty nan": (sampling(presence_penalty=math.nan), "sampling.presence_penalty"),
    "frequency_penalty -3": (sampling(frequency_penalty=-3), "sampling.frequency_penalty"),
    "too many biases": (
        sampling(logit_bias={token: 1 for token in range(1025)}),
        "sampling.logit_bias",
    ),
    "bias too large": (sampling(logit_bias={7: 100.5}), "sampling.logit_bias[7]"),
    "bias nan": (sampling(logit_bias={7: math.nan}), "sampling.logit_bias[7]"),
    "bias -inf": (sampling(logit_bias={7: -math.inf}), "sampling.logit_bias[7]"),
    "biased id outside": (sampling(logit_bias={49152: 1}), "sampling.logit_bias[49152]"),
    "allowed id outside": (
        sampling(allowed_token_ids=[1, 49152]),
        "sampling.allowed_token_ids",
    ),
    "too many allowed ids": (
        sampling(allowed_token_ids=[1] * ((1 << 20) + 1)),
        "sampling.allowed_token_ids",
    ),
    "min_tokens above max_tokens": (
        text("x", max_tokens=4, stopping=pb.StopConditions(min_tokens=5)),
        "stopping.min_tokens",
    ),
    "min_tokens above the default": (stopping(min_tokens=65), "stopping.min_tokens"),
    "min_tokens above what fits": (
        text("x", max_tokens=1000, stopping=pb.StopConditions(min_tokens=256)),
        "stopping.min_tokens",
    ),
    "nothing but eos before min_tokens": (
        text(
            "x",
            stopping=pb.StopConditions(min_tokens=2, stop_token_ids=[9]),
            sampling=pb.SamplingParams(allowed_token_ids=[2, 9]),
        ),
        "stopping.min_tokens",
    ),
    "17 stops": (stopping(stop_strings=["s"] * 17), "stopping.stop_strings"),
    "stop too long": (stopping(stop_strings=["a", "x" * 257]), "stopping.stop_strings[1]"),
    "empty stop": (stopping(stop_strings=[""]), "stopping.stop_strings[0]"),
    "stop id outside": (stopping(stop_token_ids=[49152]), "stopping.stop_token_ids[0]"),
    "too many stop ids": (stopping(stop_token_ids=range(257)), "stopping.stop_token_ids"),
    "max_tokens 0": (text("x", max_tokens=0), "max_tokens"),
    "time_limit_ms 0": (text("x", time_limit_ms=0), "time_limit_ms"),
    "n 0": (text("x", n=0), "n"),
    "n 9": (text("x", n=9), "n"),
    "logprobs 21": (output(logprobs=21), "output.logprobs"),
    "prompt_logprobs 21": (output(prompt_logprobs=21), "output.prompt_logprobs"),
    "truncate to 0": (text("x", truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    "truncated and still too long": (
        text("word " * 300, truncate_prompt_tokens=256),
        "text",
    ),
    "truncated to an id outside": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 49152]), truncate_prompt_tokens=1),
        "token_ids",
    ),
    "schema no JSON": (structured(json_schema="{"), "structured_output.json_schema"),
    "schema no object": (structured(json_schema="[]"), "structured_output.json_schema"),
    "schema too deep": (
        structured(json_schema='{"items":' * 5000),
        "structured_output.json_schema",
    ),
    "schema empty": (structured(json_schema=""), "structured_output.json_schema"),
    "no object wanted": (structured(json_object=False), "structured_output.json_object"),
    "regex too long": (structured(regex="a" * 65537), "structured_output.regex"),
    "grammar empty": (structured(grammar=""), "structured_output.grammar"),
    "no choice": (choice(), "structured_output.choice.choices"),
    "too many choices": (choice(*["a"] * 1025), "structured_output.choice.choices"),
    "an empty choice": (choice("a", ""), "structured_output.choice.choices[1]"),
    "choices too long": (choice("a" * 65537), "structured_output.choice.choices"),
    "structure past eos": (
        text(
            "x",
            structured_output=pb.StructuredOutput(regex="a"),
            stopping=pb.StopConditions(ignore_eos=True),
        ),
        "structured_output",
    ),
    "structure with min_tokens": (
        text(
            "x",
            structured_output=pb.StructuredOutput(regex="a"),
            stopping=pb.StopConditions(min_tokens=1),
        ),
        "structured_output",
    ),
    "structure of some tokens": (
        text(
            "x",
            structured_output=pb.StructuredOutput(regex="a"),
            sampling=pb.SamplingParams(allowed_token_ids=[5]),
        ),
        "structured_output",
    ),
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (text(""), "text"),
    "empty ids": (ids(), "token_ids"),
    "id outside": (ids(49152), "token_ids"),
    "prompt fills the context": (ids(*[9] * 256), "token_ids"),
    "text fills the context": (text("word " * 300), "text"),
    "chat fills the context": (
        chat(pb.ChatMessage(role="user", content="word " * 300)),
        "chat",
    ),
    "no messages": (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
    "too many messages": (chat(*[pb.ChatMessage(role="u")] * 16385), "chat.messages"),
    "no role": (chat(pb.ChatMessage(content="x")), "chat.messages[0].role"),
    "bad tools": (chat(tools_json="{}"), "chat.tools_json"),
    "bad variables": (chat(template_kwargs_json="["), "chat.template_kwargs_json"),
    "deep variables": (chat(template_kwargs_json="[" * 10**5), "chat.template_kwargs_json"),
    "half a character": (
        chat(template_kwargs_json='{"x": ["\\ud800"]}'),
        "chat.template_kwargs_json",
    ),
    "too much JSON": (chat(tools_json="[" + " " * (1 << 20) + "]"), "chat"),
    "too many ids": (ids(*[9] * ((1 << 20) + 1)), "token_ids"),
    "bad extra": (
        chat(pb.ChatMessage(role="user", content="x", extra_json='{"role": "system"}')),
        "chat.messages[0].extra_json",
    ),
    "both ways to end": (
        chat(add_generation_prompt=True, continue_final_message=True),
        "chat.add_generation_prompt",
    ),
    "id too long": (text("x", request_id="i" * 129), "request_id"),
    "id unprintable": (text("x", request_id="a\nb"), "request_id"),
    "salt too long": (text("x", cache_salt="s" * 257), "cache_salt"),
}


@pytest.mark.parametrize("case", INVALID)
async def test_a_bad_parameter_is_named(gateway: GatewayUnderTest, case: str) -> None:
    request, field = INVALID[case]
    error = await refused(gateway, request)
    assert error.code() == Status.INVALID_ARGUMENT, error.details()
    assert violated_fields(error) == [field]
    assert (error.details() or "").startswith(f"{field}: ")


NEUTRAL = {
    "top_p 1": sampling(top_p=1),
    "top_k 0": sampling(top_k=0),
    "top_k -1": sampling(top_k=-1),
    "top_k huge": sampling(top_k=10**9),
    "min_p 0": sampling(min_p=0),
    "no penalties": sampling(repetition_penalty=1, frequency_penalty=0, presence_penalty=0),
    "n 1": text("x", n=1),
    "no bias": sampling(logit_bias={5: 0.0}),
    "priority below 0": text("x", priority=-5),
    "kept whole": text("x", truncate_prompt_tokens=100),
    "model named": text("x", model="fake"),
    "min_tokens 0": stopping(min_tokens=0),
}


@pytest.mark.parametrize("case", NEUTRAL)
async def test_an_explicit_neutral_value_is_fine(gateway: GatewayUnderTest, case: str) -> None:
    assert (await gateway.collect(NEUTRAL[case])).text == "x"


async def test_an_unknown_model_is_not_found(gateway: GatewayUnderTest) -> None:
    error = await refused(gateway, text("x", model="gpt-99"))
    assert error.code() == Status.NOT_FOUND
    assert "gpt-99" in (error.details() or "")
    for call in (
        gateway.stub.Tokenize(pb.TokenizeRequest(model="gpt-99", text="x")),
        gateway.stub.Detokenize(pb.DetokenizeRequest(model="gpt-99")),
    ):
        assert await call.code() == Status.NOT_FOUND


async def test_a_template_that_refuses_says_why(gateway: GatewayUnderTest) -> None:
    request = chat(
        pb.ChatMessage(role="system", content="be brief"),
        pb.ChatMessage(role="user", content="hi"),
    )
    error = await refused(gateway, request)
    assert error.code() == Status.INVALID_ARGUMENT
    assert "System role not supported" in (error.details() or "")


async def test_a_prompt_that_is_too_long_is_told_both_numbers(gateway: GatewayUnderTest) -> None:
    error = await refused(gateway, ids(*[9] * 300))
    assert "300 tokens" in (error.details() or "")
    assert "256" in (error.details() or "")
    # One below the context leaves room for one token.
    answer = await gateway.collect(ids(*[9] * 255))
    assert answer.token_ids == [9]
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_huge_prompt_is_refused_quickly_while_health_answers(
    gateway: GatewayUnderTest,
) -> None:
    request = text("word " * (4 << 20))
    begin = time.monotonic()
    call = gateway.stream(request)
    slowest_s = 0.0
    while not call.done():
        asked_at = time.monotonic()
        await gateway.health.Check(health_pb2.HealthCheckRequest())
        slowest_s = max(slowest_s, time.monotonic() - asked_at)
    took_s = time.monotonic() - begin
    assert await call.code() == Status.INVALID_ARGUMENT
    assert "the context of 256" in await call.details()
    # 20 MiB through loopback in one process take most of it; encoding would take seconds.
    assert took_s < 1.5
    assert slowest_s < 0.5


async def test_a_template_that_never_ends_is_stopped_while_health_answers(
    make_worker: MakeWorker, start_gateway: StartGateway, served_files: dict[str, bytes]
) -> None:
    forever = "{% for a in xs %}{% for b in xs %}{% for c in xs %}" + "{% endfor %}" * 3
    files = {**served_files, "chat_template.jinja": forever.encode()}
    request = chat(template_kwargs_json=json.dumps({"xs": [0] * 10_000}))
    async with (
        make_worker(files=files) as worker,
        start_gateway(worker, template_limit_s=0.5) as gateway,
    ):
        begin = time.monotonic()
        # More of them than there are threads.
        calls = [gateway.stub.Generate(request) for _ in range(4)]
        slowest_s = 0.0
        while not all(call.done() for call in calls):
            asked = time.monotonic()
            await gateway.health.Check(health_pb2.HealthCheckRequest())
            slowest_s = max(slowest_s, time.monotonic() - asked)
            await asyncio.sleep(0.01)
        for call in calls:
            assert await call.code() == Status.INVALID_ARGUMENT
            assert "took too long" in (await call.details() or "")
        assert time.monotonic() - begin < 3
        assert slowest_s < 0.5
        # The threads are free again.
        assert (await gateway.collect(text("fine"))).text == "fine"


async def test_more_text_than_is_ever_encoded_is_refused_by_its_bytes(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker(max_context=10**6) as worker,
        start_gateway(worker, max_prompt_bytes=1000) as gateway,
    ):
        error = await refused(gateway, text("é" * 501))
        assert error.code() == Status.INVALID_ARGUMENT
        assert "1002" in (error.details() or "")
        assert (await gateway.collect(text("é" * 20))).text == "é" * 20


async def test_an_oversized_message_is_refused(gateway: GatewayUnderTest) -> None:
    error = await refused(gateway, text("x" * (33 << 20)))
    assert error.code() == Status.RESOURCE_EXHAUSTED


async def test_garbage_is_no_request(gateway: GatewayUnderTest) -> None:
    method: Any = gateway.channel.unary_unary("/tandem.v1.InferenceService/Generate")
    call = method(b"\xff\xff\xff\xff")
    assert await call.code() == Status.INVALID_ARGUMENT
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.running.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"\x00" * 4096)
    await reader.read()
    writer.close()
    await writer.wait_closed()
    assert (await gateway.collect(text("fine"))).text == "fine"


async def test_the_other_calls_answer(
    make_worker: MakeWorker, start_gateway: StartGateway, served_files: dict[str, bytes]
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        model = await gateway.stub.GetModel(pb.GetModelRequest())
        assert (model.model, model.vocab_size, model.max_context_tokens) == ("fake", 49152, 256)
        assert model.bos_token_id == 1
        assert model.has_chat_template
        assert model.max_message_bytes == 32 << 20
        assert model.tokenizer_sha256 == worker.model.tokenizer_sha256
        tokens = await gateway.stub.Tokenize(pb.TokenizeRequest(text="hi 😀"))
        back = await gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
        assert back.text == "hi 😀"
        special = pb.DetokenizeRequest(token_ids=[2], skip_special_tokens=False)
        assert (await gateway.stub.Detokenize(special)).text == "<|im_end|>"
        outside = gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=[49152]))
        assert await outside.code() == Status.INVALID_ARGUMENT
        many = gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=[9] * ((1 << 20) + 1)))
        assert await many.code() == Status.INVALID_ARGUMENT
        crowd = gateway.stub.Abort(pb.AbortRequest(request_ids=["x"] * 1025))
        assert await crowd.code() == Status.INVALID_ARGUMENT
        freed = await gateway.stub.FlushCache(pb.FlushCacheRequest())
        assert freed.pages_freed == 7
        load = await gateway.stub.GetLoad(pb.GetLoadRequest())
        assert [(worker.ready, worker.pages_total) for worker in load.workers] == [(True, 10)]
    assert json.loads(served_files["tokenizer_config.json"])["bos_token"] == "<|im_start|>"
