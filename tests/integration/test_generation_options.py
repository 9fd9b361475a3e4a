"""Options of a generation through the pair: several completions, stops, limits, order."""

import asyncio

import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect_all
from tests.integration.conftest import ECHO, MakeFolder, StartPair
from tests.integration.pair import Client, rest_of

LENGTH, TIME_LIMIT = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TIME_LIMIT


def ids(*token_ids: int, max_tokens: int = 100, **fields: object) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=token_ids)
    return pb.GenerateRequest(token_ids=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


async def test_several_completions_share_the_prompts_pages(client: Client) -> None:
    request = ids(*range(1000, 1200), max_tokens=300, n=8)
    answers = await collect_all(client.stream(request))
    assert len(answers) == 8
    assert all(answer.token_ids == list(range(1000, 1200)) for answer in answers)
    assert answers[0].started.cached_tokens == 0
    assert all(0 < answer.started.cached_tokens < 200 for answer in answers[1:])
    assert all(answer.finished.usage.completion_tokens == 201 for answer in answers)
    seeds = [answer.finished.seed for answer in answers]
    assert seeds == [(seeds[0] + i) % 2**64 for i in range(8)]


async def test_a_unary_call_has_every_completion(client: Client) -> None:
    answer = await client.stub.Generate(pb.GenerateRequest(text="hi 😀!", max_tokens=20, n=3))
    assert [completion.text for completion in answer.completions] == ["hi 😀!"] * 3
    assert [completion.index for completion in answer.completions] == [0, 1, 2]


async def test_abort_ends_every_completion(slow_client: Client) -> None:
    request = ids(*range(1000, 1100), n=3, request_id="gone")
    call = slow_client.stream(request)
    shown: set[int] = set()
    while len(shown) < 3:
        event = await call.read()
        assert isinstance(event, pb.GenerateStreamResponse)
        if event.HasField("delta"):
            shown.add(event.delta.index)
    outcome = await slow_client.stub.Abort(pb.AbortRequest(request_ids=["gone"]))
    assert outcome.outcomes[0].outcome == pb.AbortOutcome.OUTCOME_ABORTED
    reasons = [e.finished.finish_reason async for e in rest_of(call) if e.HasField("finished")]
    assert reasons == [pb.FINISH_REASON_ABORTED] * 3


async def test_a_client_that_goes_ends_every_completion(slow_client: Client) -> None:
    call = slow_client.stream(ids(*range(1000, 1100), n=4))
    for _ in range(12):
        await call.read()
    call.cancel()
    await slow_client.assert_clean(timeout_s=1)


async def test_a_time_limit_ends_every_completion_ok(slow_client: Client) -> None:
    request = ids(*range(1000, 1100), n=2, time_limit_ms=300)
    answers = await collect_all(slow_client.stream(request))
    assert [answer.finished.finish_reason for answer in answers] == [TIME_LIMIT, TIME_LIMIT]
    assert all(0 < answer.finished.usage.completion_tokens < 30 for answer in answers)


async def test_a_higher_priority_leaves_the_queue_earlier(slow_client: Client) -> None:
    # Long enough that none of them ends before the others have had their turn.
    running = [slow_client.stream(ids(*range(1000, 1100))) for _ in range(4)]
    for call in running:
        await call.read()
    order: list[str] = []

    async def follow(name: str, priority: int) -> None:
        request = ids(*range(2000, 2005), priority=priority, request_id=name)
        await slow_client.collect(request)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        queue = [("low", -1), ("none", 0), ("late", 0), ("high", 7)]
        for place, (name, priority) in enumerate(queue):
            tasks.create_task(follow(name, priority))
            await waiting(slow_client, place + 1)
        # One after the other takes the place of the first that runs.
        running[0].cancel()
    for call in running:
        call.cancel()
    assert order == ["high", "none", "late", "low"]


async def waiting(client: Client, count: int) -> None:
    """Returns when so many wait at the worker."""
    async with asyncio.timeout(10):
        while (await client.load()).workers[0].waiting < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


SWITCHES = (
    "{{ 'on' if thinking | default(true) else 'off' }} {{ tools | length if tools else 0 }}"
    "{% for m in messages %} {{ m.content }}{% endfor %}{% if add_generation_prompt %} >{% endif %}"
)


async def test_a_template_gets_all_that_a_chat_says(
    make_model_folder: MakeFolder, start_pair: StartPair
) -> None:
    folder = make_model_folder(chat_template=SWITCHES)
    user = pb.ChatMessage(role="user", content="hi")
    answer = pb.ChatMessage(role="assistant", content="I am")
    chats = {
        "on 0 hi >": pb.ChatPrompt(messages=[user]),
        "off 0 hi >": pb.ChatPrompt(messages=[user], template_kwargs_json='{"thinking": false}'),
        "on 2 hi >": pb.ChatPrompt(messages=[user], tools_json='[{"a": 1}, {}]'),
        "on 0 hi": pb.ChatPrompt(messages=[user], add_generation_prompt=False),
        "on 0 hi I am": pb.ChatPrompt(messages=[user, answer], continue_final_message=True),
    }
    with start_pair((*ECHO, "--model", str(folder))) as pair:
        async with Client(pair.address) as client:
            for expected, chat in chats.items():
                request = pb.GenerateRequest(chat=chat, max_tokens=40)
                assert (await client.collect(request)).text == expected
            await client.assert_clean()


async def test_the_end_of_a_prompt_is_kept(client: Client) -> None:
    answer = await client.collect(ids(*range(1000, 9000), truncate_prompt_tokens=5))
    assert answer.token_ids == list(range(8995, 9000))
    assert answer.finished.usage.prompt_tokens == 5


async def test_a_stop_string_before_min_tokens_is_text(client: Client) -> None:
    text = "one STOP two STOP three"
    head = len(await client.tokenize("one STOP"))
    stopping = pb.StopConditions(stop_strings=["STOP"], min_tokens=head + 1)
    request = pb.GenerateRequest(text=text, max_tokens=64, stopping=stopping)
    answer = await client.collect(request)
    assert answer.text == "one STOP two "
    assert answer.finished.stop_string == "STOP"
    stopping.min_tokens = len(await client.tokenize(text))
    request = pb.GenerateRequest(text=text, max_tokens=64, stopping=stopping)
    assert (await client.collect(request)).text == text


@pytest.mark.parametrize("stop", [[], ["\x00never"]])
async def test_logprobs_come_with_every_token(client: Client, stop: list[str]) -> None:
    request = pb.GenerateRequest(
        text="hi 😀, how are you?",
        max_tokens=64,
        output=pb.OutputOptions(logprobs=0, prompt_logprobs=0),
        stopping=pb.StopConditions(stop_strings=stop),
    )
    answer = await client.collect(request)
    chosen = [place.chosen for place in answer.logprobs]
    assert [token.token_id for token in chosen] == answer.token_ids
    assert b"".join(token.token_bytes for token in chosen).decode() == "hi 😀, how are you?"
    assert {(token.logprob, token.rank) for token in chosen} == {(0, 1)}
    for delta in answer.deltas:
        assert [place.chosen.token_id for place in delta.logprobs] == list(delta.token_ids)
    prompt = [place.chosen.token_id for place in answer.started.prompt_logprobs]
    assert prompt == answer.token_ids[1:]


async def test_options_that_echo_cannot_show_are_taken(client: Client) -> None:
    sampling = pb.SamplingParams(
        min_p=0.5,
        repetition_penalty=1.3,
        frequency_penalty=1,
        presence_penalty=-1,
        logit_bias={5: -100},
        allowed_token_ids=[7, 9],
    )
    request = pb.GenerateRequest(text="still", max_tokens=8, sampling=sampling)
    assert (await client.collect(request)).text == "still"
