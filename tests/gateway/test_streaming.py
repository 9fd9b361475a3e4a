"""What a stream says of a completion: text, tokens, end, usage and timings."""

import pytest

from gateway.tokenizer import TextTokenizer
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2
from tests.answers import collect
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet


async def test_an_echo_comes_back_whole_with_its_usage(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    ids = served.encode("hi 😀!", add_special_tokens=True)
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(text("hi 😀!"))
    assert answer.text == "hi 😀!"
    assert answer.token_ids == ids
    assert all("\ufffd" not in delta.text for delta in answer.deltas)
    assert answer.started.prompt_tokens == len(ids)
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP
    assert answer.finished.eos_token_id == 2
    assert answer.finished.usage.completion_tokens == len(ids) + 1
    assert answer.finished.timings.decode_ms == 3.5
    assert answer.finished.timings.time_to_first_token_ms > 0
    assert answer.finished.timings.total_ms >= answer.finished.timings.time_to_first_token_ms


async def test_a_unary_call_answers_the_same(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    ids = served.encode("one two", add_special_tokens=True)
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.stub.Generate(text("one two", request_id="mine"))
    assert answer.request_id == "mine"
    (completion,) = answer.completions
    assert completion.text == "one two"
    assert list(completion.token_ids) == ids
    assert completion.finished.usage.completion_tokens == len(ids) + 1


async def test_the_request_id_is_in_the_first_metadata(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        call = gateway.stream(text("hi"))
        given = dict(await call.initial_metadata())["x-request-id"]
        answer = await collect(call)
    assert answer.started.request_id == given
    assert len(given) == 32


async def test_tokens_that_wait_become_one_delta(quiet: StartQuiet, served: TextTokenizer) -> None:
    ids = served.encode("one two three four", add_special_tokens=False)
    async with quiet() as pair:
        call, request = await pair.stream()
        request.start()
        request.send_tokens(ids)
        request.finish()
        answer = await collect(call)
    assert [list(delta.token_ids) for delta in answer.deltas] == [ids]


async def test_a_long_backlog_is_cut_into_bounded_deltas(quiet: StartQuiet) -> None:
    async with quiet(max_delta_tokens=4) as pair:
        call, request = await pair.stream()
        request.start()
        request.send_tokens([100] * 10)
        request.finish()
        answer = await collect(call)
    assert [len(delta.token_ids) for delta in answer.deltas] == [4, 4, 2]


async def test_a_character_cut_by_the_length_is_flushed_once(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    whole = served.encode("ab😀", add_special_tokens=True)
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(text("ab😀", max_tokens=len(whole) - 1))
    assert answer.text == "ab\ufffd"
    assert answer.deltas[-1].text == "\ufffd"
    assert answer.token_ids == whole[:-1]
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_are_left_out_unless_asked_for(
    make_worker: MakeWorker, start_gateway: StartGateway, skip: bool
) -> None:
    ids = [100, 1, 101, 1]
    async with make_worker() as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=ids), output=pb.OutputOptions(skip_special_tokens=skip)
            )
        )
    assert ("<|im_start|>" in answer.text) is not skip
    assert answer.token_ids == ids
    assert list(answer.finished.trailing_token_ids) == ([1] if skip else [])


async def test_a_seed_is_drawn_and_told(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        first = await gateway.collect(text("hi"))
        second = await gateway.collect(text("hi"))
        given = await gateway.collect(text("hi", sampling=pb.SamplingParams(seed=0)))
    assert first.finished.seed != second.finished.seed
    assert worker.requests[0].submit.sampling.seed == first.finished.seed
    assert given.finished.seed == 0


async def test_defaults_are_resolved_before_the_worker_sees_them(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await gateway.collect(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 10)))
        await gateway.collect(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5] * 10),
                max_tokens=10**6,
                sampling=pb.SamplingParams(temperature=0, top_k=-1, top_p=1),
            )
        )
    unset, given = (request.submit for request in worker.requests)
    assert unset.max_tokens == 64
    assert (unset.sampling.temperature, unset.sampling.top_k, unset.sampling.top_p) == (1, 0, 1)
    assert unset.sampling.repetition_penalty == 1
    assert given.max_tokens == 246
    assert (given.sampling.temperature, given.sampling.top_k) == (0, 0)


async def test_a_chat_is_rendered_and_encoded_without_a_second_bos(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
    async with make_worker() as worker, start_gateway(worker) as gateway:
        tokenized = await gateway.stub.Tokenize(pb.TokenizeRequest(chat=chat))
        await gateway.collect(pb.GenerateRequest(chat=chat))
    ids = list(worker.requests[0].submit.prompt_token_ids)
    assert list(tokenized.token_ids) == ids
    rendered = served.decode(ids, skip_special_tokens=False)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_time_limit_and_a_stop_token_end_ok(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call, request = await pair.stream(text("x", time_limit_ms=500))
        assert request.submit.time_limit_ms == 500
        request.finish(worker_pb2.FINISH_REASON_TIME_LIMIT)
        limited = await collect(call)
        stopping = pb.StopConditions(stop_token_ids=[9])
        call, request = await pair.stream(text("x", stopping=stopping))
        request.start()
        request.finish(worker_pb2.FINISH_REASON_STOP_TOKEN, 9)
        stopped = await collect(call)
    assert limited.finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert limited.deltas == []
    assert stopped.finished.stop_token_id == 9
    assert stopped.finished.usage.completion_tokens == 1


async def test_a_model_without_a_tokenizer_streams_numbers(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker(files={}, vocab_size=100) as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 42])))
        model = await gateway.stub.GetModel(pb.GetModelRequest())
    assert answer.text == "7 42 "
    assert not model.has_chat_template
