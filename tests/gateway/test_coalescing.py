"""Tokens wait for each other while steps come late, and only then."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.channel import RequestChannel
from gateway.coalescing import Coalescing, RemoteClock
from gateway.tokenizer import TextTokenizer
from shared.pb.tandem.v1 import inference_pb2 as public_pb
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.answers import Collected, collect
from tests.gateway.client import text
from tests.gateway.conftest import StartQuiet
from tests.gateway.fake_worker import Received

# Tokens of a step whose messages may be what makes it late.
MANY = 256


@pytest.mark.parametrize(
    ("lag_s", "num_tokens"), [(0.0, 1), (0.0029, 1), (0.004, 2), (0.01, 4), (0.03, 8), (60.0, 8)]
)
def test_the_later_a_step_the_more_tokens_wait(lag_s: float, num_tokens: int) -> None:
    coalescing = Coalescing(is_enabled=True)
    coalescing.observe(lag_s, MANY)
    assert coalescing.num_tokens == num_tokens


def test_one_early_step_does_not_end_it_and_several_do_by_and_by() -> None:
    coalescing = Coalescing(is_enabled=True)
    coalescing.observe(1.0, MANY)
    seen = []
    for _ in range(40):
        coalescing.observe(0.0, MANY)
        seen.append(coalescing.num_tokens)
    assert seen[0] == 8
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 1


def test_a_late_step_among_early_ones_begins_the_count_anew() -> None:
    coalescing = Coalescing(is_enabled=True)
    for _ in range(20):
        coalescing.observe(0.01, MANY)
        for _ in range(4):
            coalescing.observe(0.0, MANY)
        assert coalescing.num_tokens == 4


def test_nothing_waits_where_it_is_switched_off() -> None:
    coalescing = Coalescing(is_enabled=False)
    coalescing.observe(60.0, MANY)
    assert coalescing.num_tokens == 1


def test_few_streams_do_not_wait_whatever_the_lag() -> None:
    coalescing = Coalescing(is_enabled=True)
    coalescing.observe(60.0, 4)
    assert coalescing.num_tokens == 1


@pytest.mark.parametrize("ahead_s", [-30.0, -0.02, 0.02, 30.0])
def test_a_clock_that_is_wrong_is_corrected_by_a_ping(ahead_s: float) -> None:
    clock, now = RemoteClock(), time.time()
    clock.observe(sent_at=now - 0.001, told=now + ahead_s, received_at=now + 0.001)
    age_s = clock.age_s(time.time() + ahead_s - 0.5)
    assert age_s == pytest.approx(0.5, abs=0.2)
    assert abs(age_s - 0.5) <= 0.002 + (time.time() - now)


def test_a_clock_that_may_be_right_is_taken_to_be() -> None:
    clock, now = RemoteClock(), time.time()
    # A slow answer, from a worker or to a gateway that is behind, says little.
    clock.observe(sent_at=now - 0.4, told=now - 0.3, received_at=now)
    assert clock.age_s(time.time() - 0.5) == pytest.approx(0.5, abs=0.2)
    assert clock.age_s(time.time() + 10) == 0.0


def test_a_clock_that_was_set_is_corrected_anew() -> None:
    clock, now = RemoteClock(), time.time()
    clock.observe(sent_at=now, told=now, received_at=now + 0.001)
    clock.observe(sent_at=now, told=now + 100, received_at=now + 0.001)
    assert clock.age_s(time.time() + 100 - 0.5) == pytest.approx(0.5, abs=0.2)


@asynccontextmanager
async def flowing(quiet: StartQuiet, **settings: object) -> AsyncIterator[tuple[object, Received]]:
    """A stream whose first token its client has."""
    async with quiet(**settings) as pair:
        call, request = await pair.begun(text("x", request_id="one"))
        assert (await call.read()).HasField("started")
        assert list((await call.read()).delta.token_ids) == [100]
        yield call, request


def late(request: Received, token_id: int, *, lag_s: float = 10.0) -> None:
    """A token of a step that was committed so long ago, and had many others that went."""
    output = request.output_of([token_id])
    gone = range(1000, 1000 + MANY)
    output.handles.extend(gone)
    output.token_ids.extend(gone)
    output.committed_unix_us = int(1e6 * (time.time() - lag_s))
    request.send_output(output)


async def test_tokens_of_late_steps_come_eight_at_a_time(quiet: StartQuiet) -> None:
    async with flowing(quiet) as (call, request):
        for token_id in range(200, 216):
            late(request, token_id)
        request.finish()
        answer = await collect_rest(call)
    assert [list(delta.token_ids) for delta in answer if delta.token_ids] == [
        list(range(200, 208)),
        list(range(208, 216)),
    ]


async def test_switched_off_every_token_goes_as_it_comes(quiet: StartQuiet) -> None:
    async with flowing(quiet, coalesce=False) as (call, request):
        for token_id in range(200, 216):
            late(request, token_id)
        request.finish()
        answer = await collect_rest(call)
    # Those behind it may have come while it was being written.
    assert list(answer[0].token_ids) == [200]


async def test_the_end_sends_what_waits_at_once(quiet: StartQuiet) -> None:
    async with flowing(quiet) as (call, request):
        late(request, 200)
        late(request, 201)
        request.finish()
        answer = await collect_rest(call)
    assert [list(delta.token_ids) for delta in answer] == [[200, 201]]


async def test_a_first_token_does_not_wait(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream()
        request.start()
        late(request, 100)
        assert (await call.read()).HasField("started")
        assert list((await call.read()).delta.token_ids) == [100]
        request.finish()
        await collect_rest(call)


async def test_tokens_that_no_others_follow_wait_for_a_moment_only(quiet: StartQuiet) -> None:
    async with flowing(quiet) as (call, request):
        late(request, 200)
        async with asyncio.timeout(5):
            assert list((await read(call)).delta.token_ids) == [200]
        request.finish()
        await collect_rest(call)


async def test_a_stop_string_among_tokens_that_wait_ends_the_text(
    quiet: StartQuiet, served: TextTokenizer
) -> None:
    ids = served.encode("one two three STOP four", add_special_tokens=False)
    stopping = public_pb.StopConditions(stop_strings=["STOP"])
    async with quiet() as pair:
        call, request = await pair.stream(text("x", stopping=stopping))
        request.start()
        for token_id in ids:
            late(request, token_id)
        answer = await collect(call)
        assert await pair.abort_replies(request) == [False]
    assert answer.text == "one two three "
    assert answer.finished.stop_string == "STOP"


def merged(request: Received, token_ids: Sequence[int]) -> None:
    """As a worker joins steps that wait: all tokens, and a part with the logprobs of each step."""
    whole = pb.StepOutput()
    for token_id in token_ids:
        whole.MergeFrom(request.output_of([token_id]))
    request.send_output(whole)


@pytest.mark.parametrize(
    "prompt", ["ten words are here in a row, one for each finger", "世界 😀 a STO b 😀"]
)
@pytest.mark.parametrize("num_top", [0, 3])
async def test_tokens_that_wait_together_have_the_logprobs_that_they_have_alone(
    quiet: StartQuiet, served: TextTokenizer, prompt: str, num_top: int
) -> None:
    ids = served.encode(prompt, add_special_tokens=False) * 3
    request = text(
        "x",
        output=public_pb.OutputOptions(logprobs=num_top),
        stopping=public_pb.StopConditions(stop_strings=["STOP"]),
    )
    async with quiet() as pair:

        async def answer_to(send: Callable[[Received], None]) -> Collected:
            call, received = await pair.stream(request)
            received.start()
            send(received)
            received.finish()
            return await collect(call)

        def one_by_one(received: Received) -> None:
            for token_id in ids:
                received.send_tokens([token_id])

        def in_merged_steps(received: Received) -> None:
            for begin in range(0, len(ids), 7):
                merged(received, ids[begin : begin + 7])

        def in_late_steps(received: Received) -> None:
            for token_id in ids:
                late(received, token_id)

        alone = await answer_to(one_by_one)
        assert alone.token_ids == [place.chosen.token_id for place in alone.logprobs] == ids
        spelt = b"".join(place.chosen.token_bytes for place in alone.logprobs)
        assert alone.text == spelt.decode() == prompt * 3
        for send in (in_merged_steps, in_late_steps):
            together = await answer_to(send)
            assert max(len(delta.token_ids) for delta in together.deltas) >= 7
            assert (together.text, together.token_ids) == (alone.text, alone.token_ids)
            assert together.logprobs == alone.logprobs
            for delta in together.deltas:
                assert [place.chosen.token_id for place in delta.logprobs] == delta.token_ids


async def test_a_channel_that_is_listened_to_tells_of_what_it_has_when_nobody_listens_again() -> (
    None
):
    heard: list[int] = []
    channel = RequestChannel(1, lambda _: None)
    channel.listen(lambda: heard.append(len(channel.token_ids)))
    channel.token_ids.append(5)
    channel.notify()
    assert heard == [1]
    channel.listen(None)
    async with asyncio.timeout(5):
        await channel.wait()
    assert channel.take_tokens(10) == [5]


async def read(call: object) -> public_pb.GenerateStreamResponse:
    response: public_pb.GenerateStreamResponse = await call.read()  # type: ignore[attr-defined]
    return response


async def collect_rest(call: object) -> list[public_pb.Delta]:
    """The deltas until the one Finished."""
    deltas: list[public_pb.Delta] = []
    while not (response := await read(call)).HasField("finished"):
        deltas.append(response.delta)
    return deltas
