"""Text comes out as it went in: characters, stops, ends and limits, through the whole pair."""

import time

import grpc
import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.integration.conftest import ECHO, MakeFolder, StartPair
from tests.integration.pair import Client

STOP = pb.FINISH_REASON_STOP
LENGTH = pb.FINISH_REASON_LENGTH


def echo(text: str, max_tokens: int = 64, **stopping: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        max_tokens=max_tokens,
        stopping=pb.StopConditions(**stopping),  # type: ignore[arg-type]
    )


async def test_no_delta_splits_a_character(client: Client) -> None:
    prompt = await client.tokenize("hi 😀!")
    assert len(await client.tokenize("😀")) >= 2
    answer = await client.collect(echo("hi 😀!"))
    assert answer.text == "hi 😀!"
    assert all("\ufffd" not in delta.text for delta in answer.deltas)
    assert answer.finished.finish_reason == STOP
    assert answer.finished.eos_token_id == 2
    assert answer.token_ids == prompt
    # The eos token is counted, and is not among the ids.
    assert answer.finished.usage.completion_tokens == len(prompt) + 1
    assert answer.finished.usage.prompt_tokens == len(prompt)


async def test_a_character_cut_by_the_length_is_flushed_once(client: Client) -> None:
    whole = await client.tokenize("ab😀")
    cut = len(whole) - 1
    answer = await client.collect(echo("ab😀", max_tokens=cut))
    assert answer.text == "ab\ufffd"
    assert answer.deltas[-1].text.endswith("\ufffd")
    assert answer.finished.finish_reason == LENGTH
    assert answer.finished.usage.completion_tokens == cut == len(answer.token_ids)


async def test_a_stop_string_across_tokens_is_cut_out_and_ends_the_work(client: Client) -> None:
    long_tail = " and on it goes" * 100
    assert len(await client.tokenize("STOPx")) >= 2
    before = (await client.load()).workers[0].steps
    request = echo("one two STOPxyz" + long_tail, 500, stop_strings=["STOPx"])
    answer = await client.collect(request)
    assert answer.text == "one two "
    assert not any("S" in delta.text for delta in answer.deltas)
    assert answer.finished.finish_reason == STOP
    assert answer.finished.stop_string == "STOPx"
    await client.assert_clean()
    matched = answer.finished.usage.completion_tokens
    assert matched <= len(await client.tokenize("one two STOPxyz"))
    # Idle steps do not count, so what ran beyond the match is what the abort's way cost.
    # The step time is 1 ms here: the way there and back may take several steps.
    assert (await client.load()).workers[0].steps - before < 300


async def test_a_false_partial_stop_is_released_whole(client: Client) -> None:
    answer = await client.collect(echo("STOq done", stop_strings=["STOP"]))
    assert answer.text == "STOq done"
    assert answer.finished.finish_reason == STOP
    assert answer.finished.WhichOneof("matched") == "eos_token_id"


async def test_the_stop_string_is_kept_when_asked_for(client: Client) -> None:
    request = echo("one STOP two", stop_strings=["STOP"], include_stop_string=True)
    assert (await client.collect(request)).text == "one STOP"


async def test_a_stop_inside_a_token_cuts_the_token(client: Client) -> None:
    answer = await client.collect(echo("I love Paris now", stop_strings=["Pari"]))
    assert answer.text == "I love "


async def test_a_replacement_character_in_the_text_is_kept(client: Client) -> None:
    assert (await client.collect(echo("ok\ufffd"))).text == "ok\ufffd"


async def test_a_stop_token_ends_and_is_named(client: Client) -> None:
    ids = await client.tokenize("alpha beta gamma")
    answer = await client.collect(echo("alpha beta gamma", stop_token_ids=[ids[1]]))
    assert answer.token_ids == ids[:1]
    assert answer.finished.stop_token_id == ids[1]
    assert answer.finished.usage.completion_tokens == 2


async def test_every_eos_of_generation_config_ends(
    make_model_folder: MakeFolder, start_pair: StartPair
) -> None:
    folder = make_model_folder(eos_token_id=[2, 7])
    args = (*ECHO, "--model", str(folder))
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            ids = [100, 200, 300, 7, 400, 500]
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_tokens=6)
            answer = await client.collect(request)
            assert answer.finished.eos_token_id == 7
            assert answer.token_ids == ids[:3]
            request.stopping.ignore_eos = True
            answer = await client.collect(request)
            assert answer.finished.finish_reason == LENGTH
            assert answer.token_ids == ids
            await client.assert_clean()


async def test_max_tokens_and_prompt_limits_at_the_edges(
    start_pair: StartPair,
) -> None:
    args = (*ECHO, "--max-context", "256")
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            await _max_tokens_edges(client)
            await _prompt_edges(client)
            await client.assert_clean()


async def _max_tokens_edges(client: Client) -> None:
    def request(max_tokens: int | None) -> pb.GenerateRequest:
        made = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=range(100, 110)),
            stopping=pb.StopConditions(ignore_eos=True),
        )
        if max_tokens is not None:
            made.max_tokens = max_tokens
        return made

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.collect(request(0))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in (refused.value.details() or "")
    one = await client.collect(request(1))
    assert (len(one.token_ids), one.finished.finish_reason) == (1, LENGTH)
    million = await client.collect(request(10**6))
    assert million.finished.usage.completion_tokens == 246
    assert million.finished.finish_reason == LENGTH
    unset = await client.collect(request(None))
    model = await client.stub.GetModel(pb.GetModelRequest())
    assert unset.finished.usage.completion_tokens == min(246, model.default_max_tokens)


async def _prompt_edges(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as empty:
        await client.collect(echo(""))
    assert empty.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    begin = time.monotonic()
    full = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100] * 256))
    with pytest.raises(grpc.aio.AioRpcError) as too_long:
        await client.collect(full)
    assert time.monotonic() - begin < 0.5
    assert too_long.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "256" in (too_long.value.details() or "")
    fits = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100] * 255))
    assert len((await client.collect(fits)).token_ids) == 1
