"""Log-probabilities stay beside the tokens they are of, however the text is cut."""

from typing import Any

import grpc
import pytest

from gateway.tokenizer import TextTokenizer
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2
from tests.answers import collect, collect_all, violated_fields
from tests.gateway.client import error_of, text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet, StartQuietTwo
from tests.gateway.fake_worker import EOS


def told(logprobs: list[pb.TokenLogprobs]) -> list[int]:
    """The ids they are of, each held to the fake worker's numbers."""
    for place in logprobs:
        chosen = place.chosen
        assert (chosen.logprob, chosen.rank) == (-chosen.token_id, chosen.token_id % 9 + 1)
    return [place.chosen.token_id for place in logprobs]


def wanting(num_top: int, prompt: str = "x", **fields: Any) -> pb.GenerateRequest:
    return text(prompt, output=pb.OutputOptions(logprobs=num_top), **fields)


async def test_every_token_has_its_own_and_the_likeliest_beside_it(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(wanting(4, "hi there"))
    ids = served.encode("hi there", add_special_tokens=True)
    assert answer.token_ids == told(answer.logprobs) == ids
    for delta in answer.deltas:
        assert told(list(delta.logprobs)) == list(delta.token_ids)
    for token_id, place in zip(ids, answer.logprobs, strict=True):
        assert [top.token_id for top in place.top] == [token_id + 1 + i for i in range(4)]
        assert [top.logprob for top in place.top] == [0, -1, -1, -3]
        # Equals share a rank, and the next one counts them all.
        assert [top.rank for top in place.top] == [1, 2, 2, 4]


async def test_none_are_told_unless_asked_for(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(text("hi"))
        chosen_only = await gateway.collect(wanting(0, "hi"))
    assert answer.logprobs == []
    assert not answer.started.prompt_logprobs
    assert not worker.requests[0].submit.HasField("logprobs")
    assert told(chosen_only.logprobs) == chosen_only.token_ids
    assert all(not place.top for place in chosen_only.logprobs)


async def test_a_part_of_a_character_is_told_by_its_bytes(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(wanting(0, "hi 😀!"))
    chosen = [place.chosen for place in answer.logprobs]
    assert b"".join(token.token_bytes for token in chosen).decode() == "hi 😀!"
    assert any("\ufffd" in token.text for token in chosen)
    assert chosen[0].text == "hi"


async def test_a_special_token_is_told_although_the_text_leaves_it_out(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[100, 1]), output=pb.OutputOptions(logprobs=1)
    )
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(request)
    assert list(answer.finished.trailing_token_ids) == [1]
    (trailing,) = answer.finished.trailing_logprobs
    assert (trailing.chosen.token_id, trailing.chosen.text) == (1, "<|im_start|>")
    assert told(answer.logprobs) == [100, 1]


async def test_tokens_that_wait_for_text_wait_with_their_logprobs(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    ids = served.encode("a STO no 😀 STOP and on", add_special_tokens=False)
    stopping = pb.StopConditions(stop_strings=["STOP"])
    async with make_worker(step_s=0.001) as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(wanting(2, "a STO no 😀 STOP and on", stopping=stopping))
    assert answer.finished.stop_string == "STOP"
    num_tokens = answer.finished.usage.completion_tokens
    for delta in answer.deltas:
        assert told(list(delta.logprobs)) == list(delta.token_ids)
    trailing = answer.finished
    assert told(list(trailing.trailing_logprobs)) == list(trailing.trailing_token_ids)
    assert told(answer.logprobs) == ids[:num_tokens]


async def test_what_comes_behind_a_stop_string_in_one_step_is_dropped(
    quiet: StartQuiet, served: TextTokenizer
) -> None:
    ids = served.encode("one STOP two three", add_special_tokens=False)
    request = wanting(1, "x", stopping=pb.StopConditions(stop_strings=["STOP"]))
    async with quiet() as pair:
        call, received = await pair.stream(request)
        received.start()
        received.send_tokens(ids)
        answer = await collect(call)
    assert answer.text == "one "
    assert answer.token_ids == told(answer.logprobs)
    assert len(answer.token_ids) == answer.finished.usage.completion_tokens < len(ids)


async def test_those_of_the_token_that_ends_are_dropped_with_its_id(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, received = await pair.stream(wanting(1))
        received.start()
        received.send_tokens([100, 1], also_ended_by=EOS)
        received.finish(worker_pb2.FINISH_REASON_EOS, EOS)
        answer = await collect(call)
    assert answer.token_ids == told(answer.logprobs) == [100, 1]


async def test_a_backlog_is_cut_by_what_it_tells(quiet: StartQuiet) -> None:
    async with quiet(max_delta_tokens=10) as pair:
        call, received = await pair.stream(wanting(4))
        received.start()
        received.send_tokens([100] * 5)
        received.finish()
        answer = await collect(call)
    assert [len(delta.logprobs) for delta in answer.deltas] == [2, 2, 1]


async def test_a_worker_that_leaves_them_out_is_at_fault(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, received = await pair.stream(wanting(1))
        received.sends_logprobs = False
        received.start()
        received.send_tokens([100])
        assert (await error_of(call)).code() == grpc.StatusCode.INTERNAL
        assert await pair.abort_replies(received) == [False]


async def test_a_unary_call_has_them_all(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[100, 101, 1]),
        output=pb.OutputOptions(logprobs=2, prompt_logprobs=1),
    )
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.stub.Generate(request)
    (completion,) = answer.completions
    assert told(completion.logprobs) == list(completion.token_ids) == [100, 101, 1]
    assert told(completion.prompt_logprobs) == [101, 1]


async def test_started_waits_for_the_prompts(quiet: StartQuiet) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[10, 11, 12, 13]), output=pb.OutputOptions(prompt_logprobs=3)
    )
    async with quiet() as pair:
        call, received = await pair.stream(request)
        received.sends_logprobs = False
        received.start(queue_position=3)
        received.send_prompt_logprobs([11])
        received.send_prompt_logprobs([12, 13])
        started = (await call.read()).started
        received.finish()
        assert (await call.read()).HasField("finished")
    assert told(started.prompt_logprobs) == [11, 12, 13]
    assert started.queue_position == 3
    assert [len(place.top) for place in started.prompt_logprobs] == [3, 3, 3]


async def test_a_prompt_of_one_token_has_none(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[10]), output=pb.OutputOptions(prompt_logprobs=3)
    )
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(request)
    assert not answer.started.prompt_logprobs
    assert answer.token_ids == [10]


async def test_a_prompt_that_is_aborted_midway_has_those_that_came(quiet: StartQuiet) -> None:
    request = pb.GenerateRequest(
        request_id="mine",
        token_ids=pb.TokenIds(ids=[10, 11, 12]),
        output=pb.OutputOptions(prompt_logprobs=0),
    )
    async with quiet() as pair:
        call, received = await pair.stream(request)
        received.sends_logprobs = False
        received.start()
        received.send_prompt_logprobs([11])
        await pair.gateway.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        answer = await collect(call)
    assert answer.finished.finish_reason == pb.FINISH_REASON_ABORTED
    assert told(list(answer.started.prompt_logprobs)) == [11]


async def test_a_token_before_the_prompts_logprobs_is_a_fault(quiet: StartQuiet) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[10, 11]), output=pb.OutputOptions(prompt_logprobs=1)
    )
    async with quiet() as pair:
        call, received = await pair.stream(request)
        received.sends_logprobs = False
        received.start()
        received.send_tokens([100])
        assert await call.code() == grpc.StatusCode.INTERNAL


async def test_a_second_worker_tells_the_prompts_anew(quiet_two: StartQuietTwo) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[10, 11, 12]), output=pb.OutputOptions(prompt_logprobs=0)
    )
    async with quiet_two() as two:
        call, first, second = await two.stream(request)
        received = first.requests[0]
        received.sends_logprobs = False
        received.start()
        received.send_prompt_logprobs([11])
        await first.crash()
        received = await second.request()
        received.start()
        received.finish()
        answer = await collect(call)
        await first.start()
    assert told(list(answer.started.prompt_logprobs)) == [11, 12]


async def test_more_than_fit_in_a_message_are_refused(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[9] * 20000), output=pb.OutputOptions(prompt_logprobs=20)
    )
    async with make_worker(max_context=1 << 16) as worker, start_gateway(worker) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.collect(request)
        assert violated_fields(caught.value) == ["output.prompt_logprobs"]
        assert "420000" in (caught.value.details() or "")
        request.truncate_prompt_tokens = 12000
        request.max_tokens = 1
        answer = await gateway.collect(request)
    assert len(answer.started.prompt_logprobs) == 11999


async def test_a_unary_call_for_more_than_fit_in_its_answer_is_refused_before_any_work(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[100]),
        n=2,
        max_tokens=10_000,
        output=pb.OutputOptions(logprobs=20),
    )
    async with make_worker(max_context=1 << 16) as worker, start_gateway(worker) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.Generate(request)
        assert violated_fields(caught.value) == ["output.logprobs"]
        assert "at most 262144, got 420000" in (caught.value.details() or "")
        assert not worker.requests
        # As many by a stream, or half as many.
        streamed = await collect_all(gateway.stream(request))
        request.n = 1
        answer = await gateway.stub.Generate(request)
    assert [told(one.logprobs) for one in streamed] == [[100], [100]]
    assert told(answer.completions[0].logprobs) == [100]


async def test_tokens_that_the_context_has_no_room_for_do_not_count(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[100]),
        max_tokens=1 << 30,
        output=pb.OutputOptions(logprobs=20),
    )
    async with make_worker(max_context=256) as worker, start_gateway(worker) as gateway:
        answer = await gateway.stub.Generate(request)
    assert told(answer.completions[0].logprobs) == [100]


async def test_a_model_without_a_tokenizer_tells_numbers(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[7]), output=pb.OutputOptions(logprobs=1)
    )
    async with make_worker(files={}, vocab_size=100) as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(request)
    assert [place.chosen.text for place in answer.logprobs] == ["7 "]
