"""Each status that is promised, tried through the pair; after each, the next request works."""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import retry_delay_s, violated_fields
from tests.integration.conftest import ECHO, MakeFolder, StartPair
from tests.integration.pair import Client, Pair, rest_of

Code = grpc.StatusCode
REFUSING_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


async def refused(client: Client, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error of a request that must fail; then a good request must still work."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.collect(request)
    good = pb.GenerateRequest(text="still here", max_tokens=8)
    assert (await client.collect(good)).text == "still here"
    return caught.value


def sampling(**fields: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", max_tokens=4, sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def stopping(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", max_tokens=4, stopping=pb.StopConditions(**fields))  # type: ignore[arg-type]


BAD = {
    "temperature below 0": (sampling(temperature=-1), "sampling.temperature"),
    "temperature nan": (sampling(temperature=math.nan), "sampling.temperature"),
    "temperature inf": (sampling(temperature=math.inf), "sampling.temperature"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p"),
    "top_p 1.5": (sampling(top_p=1.5), "sampling.top_p"),
    "top_k -2": (sampling(top_k=-2), "sampling.top_k"),
    "repetition 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    "min_p 2": (sampling(min_p=2), "sampling.min_p"),
    "presence -3": (sampling(presence_penalty=-3), "sampling.presence_penalty"),
    "biased id outside": (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias={49152: 1})),
        "sampling.logit_bias",
    ),
    "allowed id outside": (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(allowed_token_ids=[49152])),
        "sampling.allowed_token_ids",
    ),
    "logprobs 21": (
        pb.GenerateRequest(text="x", output=pb.OutputOptions(logprobs=21)),
        "output.logprobs",
    ),
    "n 9": (pb.GenerateRequest(text="x", n=9), "n"),
    "min_tokens 5": (stopping(min_tokens=5), "stopping.min_tokens"),
    "truncate 0": (
        pb.GenerateRequest(text="x", truncate_prompt_tokens=0),
        "truncate_prompt_tokens",
    ),
    "17 stops": (stopping(stop_strings=[f"s{i}" for i in range(17)]), "stopping.stop_strings"),
    "stop of 257 bytes": (stopping(stop_strings=["x" * 257]), "stopping.stop_strings"),
    "empty stop": (stopping(stop_strings=[""]), "stopping.stop_strings"),
    "stop id outside": (stopping(stop_token_ids=[49152]), "stopping.stop_token_ids"),
    "max_tokens 0": (pb.GenerateRequest(text="x", max_tokens=0), "max_tokens"),
    "no prompt": (pb.GenerateRequest(max_tokens=4), "prompt"),
    "empty text": (pb.GenerateRequest(text="", max_tokens=4), "text"),
    "empty ids": (pb.GenerateRequest(token_ids=pb.TokenIds(), max_tokens=4), "token_ids"),
    "id outside": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[49152])), "token_ids"),
    "no messages": (pb.GenerateRequest(chat=pb.ChatPrompt(), max_tokens=4), "chat"),
    "long id": (pb.GenerateRequest(text="x", request_id="i" * 129), "request_id"),
    "too long": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9] * 4096)), "token_ids"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_parameter_is_named(client: Client, case: str) -> None:
    request, path = BAD[case]
    error = await refused(client, request)
    assert error.code() == Code.INVALID_ARGUMENT, error.details()
    assert path in (error.details() or "")
    assert any(path in violated for violated in violated_fields(error))


async def test_what_an_engine_cannot_do_is_named(client: Client) -> None:
    structured = pb.GenerateRequest(text="x", structured_output=pb.StructuredOutput(regex="a+"))
    error = await refused(client, structured)
    assert error.code() == Code.UNIMPLEMENTED
    assert violated_fields(error) == ["structured_output"]


@pytest.mark.parametrize(
    "fields", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"min_p": 0.0}]
)
async def test_explicit_neutral_values_are_fine(client: Client, fields: dict[str, float]) -> None:
    request = sampling(temperature=0, **fields)
    assert (await client.collect(request)).text == "x"


async def test_an_unknown_model_is_not_found(client: Client) -> None:
    error = await refused(client, pb.GenerateRequest(text="x", model="gpt-99"))
    assert error.code() == Code.NOT_FOUND
    assert "gpt-99" in (error.details() or "")


async def test_a_template_that_refuses_says_why(
    make_model_folder: MakeFolder, start_pair: StartPair
) -> None:
    folder = make_model_folder(chat_template=REFUSING_TEMPLATE)
    args = (*ECHO, "--model", str(folder))
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            chat = pb.ChatPrompt(
                messages=[
                    pb.ChatMessage(role="system", content="be brief"),
                    pb.ChatMessage(role="user", content="hi"),
                ]
            )
            error = await refused(client, pb.GenerateRequest(chat=chat, max_tokens=4))
            assert error.code() == Code.INVALID_ARGUMENT
            assert "System role not supported" in (error.details() or "")
            await client.assert_clean()


async def test_a_template_that_prints_bos_makes_one_bos(
    make_model_folder: MakeFolder,
    tokenizer_files: dict[str, bytes],
    start_pair: StartPair,
) -> None:
    bos = {"id": 1, "token": "<|im_start|>"}
    tokenizer = json.loads(tokenizer_files["tokenizer.json"])
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos["token"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            bos["token"]: {"id": bos["token"], "ids": [bos["id"]], "tokens": [bos["token"]]}
        },
    }
    folder = make_model_folder(
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
        tokenizer_json=json.dumps(tokenizer).encode(),
        tokenizer_config={"bos_token": bos["token"]},
    )
    args = (*ECHO, "--model", str(folder))
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
            ids = (await client.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
            assert list(ids).count(1) == 1
            assert ids[0] == 1
            text = (await client.stub.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids
            assert list(text) == list(ids)
            answer = await client.collect(pb.GenerateRequest(chat=chat, max_tokens=4))
            assert answer.finished.usage.prompt_tokens == len(ids)
            await client.assert_clean()


async def test_a_live_id_is_refused_and_the_first_is_unharmed(slow_client: Client) -> None:
    text = "one two three four five six seven eight"
    request = pb.GenerateRequest(text=text, max_tokens=64, request_id="x")
    first = slow_client.stream(request)
    started = await first.read()
    assert isinstance(started, pb.GenerateStreamResponse)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow_client.collect(request)
    assert caught.value.code() == Code.ALREADY_EXISTS
    rest = [event async for event in rest_of(first)]
    assert "".join(event.delta.text for event in rest) == text
    assert (await slow_client.collect(request)).text == text


async def test_a_full_queue_refuses_at_once(slow_client: Client) -> None:
    async def one(index: int) -> tuple[str, float, float]:
        request = pb.GenerateRequest(text=f"{index} a b c d e f g h", max_tokens=64)
        begin = time.monotonic()
        try:
            await slow_client.collect(request)
        except grpc.aio.AioRpcError as error:
            assert error.code() == Code.RESOURCE_EXHAUSTED
            return "full", time.monotonic() - begin, retry_delay_s(error)
        return "ok", time.monotonic() - begin, 0.0

    await slow_client.collect(pb.GenerateRequest(text="warm", max_tokens=4))
    results = await asyncio.gather(*(one(index) for index in range(12)))
    full = [result for result in results if result[0] == "full"]
    assert len(full) == 4
    assert all(delay > 0 for _, _, delay in full)
    # Before any of the others is through: nobody waits to be refused.
    served = [result for result in results if result[0] == "ok"]
    assert max(took for _, took, _ in full) < min(took for _, took, _ in served)


async def test_a_refusal_by_a_full_queue_takes_less_than_50_ms(slow_client: Client) -> None:
    endless = pb.GenerateRequest(text="a b c d " * 100, max_tokens=400)
    calls = [slow_client.stream(endless) for _ in range(8)]
    async with asyncio.timeout(10):
        while (await slow_client.load()).workers[0].waiting < 4:  # noqa: ASYNC110 - none to await
            await asyncio.sleep(0.01)
    took_ms = []
    for _ in range(15):
        begin = time.perf_counter()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await slow_client.collect(pb.GenerateRequest(text="one more"))
        took_ms.append(1e3 * (time.perf_counter() - begin))
        assert caught.value.code() == Code.RESOURCE_EXHAUSTED
        assert retry_delay_s(caught.value) > 0
    for call in calls:
        call.cancel()
    # 1.3 ms on a quiet machine; the median, because others may use this one.
    assert statistics.median(took_ms) < 50


async def test_a_deadline_ends_a_running_request(slow_client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow_client.collect(pb.GenerateRequest(text="a b c d " * 100), timeout_s=0.3)
    assert caught.value.code() == Code.DEADLINE_EXCEEDED


async def test_a_deadline_ends_a_queued_request(slow_client: Client) -> None:
    long = pb.GenerateRequest(text="a b c d " * 20, max_tokens=80)
    running = [slow_client.stream(long) for _ in range(4)]
    for call in running:
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow_client.collect(pb.GenerateRequest(text="queued"), timeout_s=0.2)
    assert caught.value.code() == Code.DEADLINE_EXCEEDED
    for call in running:
        call.cancel()


async def test_a_time_limit_ends_ok(slow_client: Client) -> None:
    request = pb.GenerateRequest(text="a b c d " * 100, max_tokens=300, time_limit_ms=300)
    answer = await slow_client.collect(request)
    assert answer.finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert 0 < answer.finished.usage.completion_tokens < 30


async def test_abort_ends_ok_with_true_usage(slow_client: Client) -> None:
    request = pb.GenerateRequest(text="a b c d " * 100, max_tokens=300, request_id="gone")
    call = slow_client.stream(request)
    events: list[pb.GenerateStreamResponse] = []
    outcomes: list[pb.AbortOutcome] = []
    async for event in call:
        events.append(event)
        if len(events) == 4:
            abort = pb.AbortRequest(request_ids=["gone", "never-was"])
            outcomes = list((await slow_client.stub.Abort(abort)).outcomes)
    assert [outcome.outcome for outcome in outcomes] == [
        pb.AbortOutcome.OUTCOME_ABORTED,
        pb.AbortOutcome.OUTCOME_NOT_FOUND,
    ]
    finished = events[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_ABORTED
    ids = [token for event in events for token in event.delta.token_ids]
    assert finished.usage.completion_tokens == len(ids) + len(finished.trailing_token_ids)
    again = await slow_client.stub.Abort(pb.AbortRequest(request_ids=["gone"]))
    assert again.outcomes[0].outcome == pb.AbortOutcome.OUTCOME_NOT_FOUND


async def test_an_oversized_message_is_refused(client: Client) -> None:
    error = await refused(client, pb.GenerateRequest(text="x" * (33 << 20)))
    assert error.code() == Code.RESOURCE_EXHAUSTED
    # No RetryInfo: it will never fit.
    assert rpc_status.from_call(error) is None


async def test_a_huge_prompt_is_refused_while_health_answers(
    client: Client, echo_pair: Pair
) -> None:
    async with grpc.aio.insecure_channel(echo_pair.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        slowest = 0.0
        task = asyncio.gather(refused(client, pb.GenerateRequest(text="word " * (4 << 20))))
        while not task.done():
            begin = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            slowest = max(slowest, time.monotonic() - begin)
            await asyncio.sleep(0.01)
        (error,) = task.result()
    assert error.code() == Code.INVALID_ARGUMENT
    assert slowest < 1.0


async def test_without_a_worker_it_is_unavailable(start_pair: StartPair) -> None:
    with start_pair(ECHO) as pair:
        pair.workers[0].stop()
        pair.gateway.wait_serving(serving=False)
        async with Client(pair.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.collect(pb.GenerateRequest(text="x"))
            assert caught.value.code() == Code.UNAVAILABLE
            assert retry_delay_s(caught.value) > 0
            pair.workers[0].start()
            pair.gateway.wait_serving()
            assert (await client.collect(pb.GenerateRequest(text="back"))).text == "back"
            await client.assert_clean()


@pytest.fixture(scope="module")
def guarded_pair(start_pair: StartPair) -> Iterator[Pair]:
    args = ("--tokens", "correct-horse,battery-staple")
    with start_pair(ECHO, args, token="correct-horse") as pair:
        yield pair


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, Code.UNAUTHENTICATED),
        ("Bearer wrong", Code.UNAUTHENTICATED),
        ("Basic correct-horse", Code.UNAUTHENTICATED),
        ("Bearer correct-horse", Code.OK),
        ("Bearer battery-staple", Code.OK),
    ],
)
async def test_a_token_is_asked_for(guarded_pair: Pair, header: str | None, code: Code) -> None:
    metadata = (("authorization", header),) if header else ()
    async with Client(guarded_pair.address) as client:
        call = client.stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata, timeout=30)
        assert await call.code() == code
