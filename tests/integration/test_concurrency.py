"""Many requests at once: nobody gets another's tokens, and nothing is left behind."""

import asyncio
import random
import time

import grpc
import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.integration.conftest import MakeFolder, StartPair
from tests.integration.pair import Client


def echo_ids(ids: list[int], **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 4])
async def test_twin_prompts_keep_their_text_through_eviction(
    page_size: int, start_pair: StartPair
) -> None:
    sizes = ("--page-size", str(page_size), "--kv-pages", str(700 // page_size))
    args = ("--engine", "echo", "--max-context", "128", "--max-running", "8", *sizes)
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            twin = [100 + i for i in range(40)]
            solo = await client.collect(echo_ids(twin, max_tokens=50))
            assert solo.token_ids == twin
            await client.stub.FlushCache(pb.FlushCacheRequest())
            twins = await asyncio.gather(
                *(client.collect(echo_ids(twin, max_tokens=50)) for _ in range(8))
            )
            for answer in twins:
                assert answer.token_ids == twin
                assert answer.finished.usage.cached_tokens <= len(twin) - 1
            fillers = [[1000 + 50 * i + j for j in range(50)] for i in range(20)]
            answers = await asyncio.gather(
                *(client.collect(echo_ids(ids, max_tokens=60)) for ids in fillers)
            )
            assert [answer.token_ids for answer in answers] == fillers
            first = await client.collect(echo_ids(twin, max_tokens=50))
            again = await client.collect(echo_ids(twin, max_tokens=50))
            assert first.token_ids == again.token_ids == twin
            assert again.finished.usage.cached_tokens in (40 - page_size, 39)
            await client.assert_clean()


def _mixed_requests() -> list[pb.GenerateRequest]:
    rng = random.Random(7)
    shared_prefix = [rng.randrange(100, 40000) for _ in range(60)]
    requests = []
    for index in range(64):
        ids = [rng.randrange(100, 40000) for _ in range(rng.randrange(1, 120))]
        if index % 3 == 0:
            ids = shared_prefix + ids
        if index % 7 == 0:
            ids[len(ids) // 2] = 2  # eos in the middle
        request = echo_ids(ids, max_tokens=rng.choice([1, 5, 30, 200]))
        if index % 5 == 0:
            request.stopping.stop_token_ids.append(ids[-1])
        if index % 11 == 0:
            request.stopping.ignore_eos = True
        requests.append(request)
    return requests


CONFIGURATIONS = {
    "overlap": (),
    "serial": ("--no-overlap",),
    "one at a time": ("--max-running", "1"),
    "four at a time": ("--max-running", "4"),
    "no prefix cache": ("--no-prefix-caching",),
    "chunks of 16": ("--token-budget", "16"),
    "prefill first": ("--policy", "prefill-first"),
    "pages run out": ("--kv-pages", "512", "--page-size", "1"),
    "pages of 16 run out": ("--kv-pages", "32", "--page-size", "16", "--no-overlap"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_every_configuration_gives_the_same_tokens(name: str, start_pair: StartPair) -> None:
    requests = _mixed_requests()
    args = ("--engine", "echo", "--max-context", "400", *CONFIGURATIONS[name])
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            answers = await asyncio.gather(*(client.collect(request) for request in requests))
            for request, answer in zip(requests, answers, strict=True):
                assert _outcome(answer.token_ids, answer.finished) == _expected(request)
            await client.assert_clean()
            if name.startswith("pages"):
                assert (await client.load()).workers[0].preemptions > 0


def _outcome(ids: list[int], finished: pb.Finished) -> tuple[list[int], int, str | None]:
    return ids, finished.finish_reason, finished.WhichOneof("matched")


def _expected(request: pb.GenerateRequest) -> tuple[list[int], int, str | None]:
    """What an echo must give, told from the request alone."""
    ids = list(request.token_ids.ids)
    out: list[int] = []
    for index in range(request.max_tokens):
        token = ids[index] if index < len(ids) else 2
        if token == 2 and not request.stopping.ignore_eos:
            return out, pb.FINISH_REASON_STOP, "eos_token_id"
        if token in request.stopping.stop_token_ids:
            return out, pb.FINISH_REASON_STOP, "stop_token_id"
        out.append(token)
    return out, pb.FINISH_REASON_LENGTH, None


async def test_greedy_is_greedy_whatever_the_batch(
    make_model_folder: MakeFolder, start_pair: StartPair
) -> None:
    folder = make_model_folder()
    args = ("--engine", "cpu", "--model", str(folder), "--dummy-weights", "--max-context", "256")
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            greedy = [
                pb.SamplingParams(temperature=0, top_p=0.3),
                pb.SamplingParams(temperature=0),
                pb.SamplingParams(temperature=2, top_k=1),
            ]
            requests = []
            for run in range(20):
                for params in greedy:
                    request = echo_ids([5, 6, 7, 8], max_tokens=12, sampling=params)
                    request.stopping.ignore_eos = True
                    requests.append(request)
                noise = pb.SamplingParams(temperature=1.5, seed=run, top_p=0.9)
                requests.append(echo_ids([run + 10] * (run + 1), max_tokens=9, sampling=noise))
            answers = await asyncio.gather(*(client.collect(request) for request in requests))
            ids = [a.token_ids for i, a in enumerate(answers) if i % 4 != 3]
            assert len(ids[0]) == 12
            assert all(other == ids[0] for other in ids)
            await client.assert_clean()


async def test_a_seed_repeats_a_draw_alone_and_in_company(
    make_model_folder: MakeFolder, start_pair: StartPair
) -> None:
    folder = make_model_folder()
    args = ("--engine", "cpu", "--model", str(folder), "--dummy-weights", "--max-context", "256")
    with start_pair(args) as pair:
        async with Client(pair.address) as client:
            draw = pb.SamplingParams(temperature=1.0, top_k=50, top_p=0.95)
            request = echo_ids([5, 6, 7, 8], max_tokens=16, sampling=draw)
            request.stopping.ignore_eos = True
            alone = await client.collect(request)
            request.sampling.seed = alone.finished.seed
            others = [
                client.collect(echo_ids([9 + i] * 9, max_tokens=20, sampling=draw))
                for i in range(6)
            ]
            again, *_ = await asyncio.gather(client.collect(request), *others)
            assert again.token_ids == alone.token_ids
            await client.assert_clean()


async def test_a_cancelled_stream_gives_its_pages_back(slow_client: Client) -> None:
    for _ in range(3):
        call = slow_client.stream(pb.GenerateRequest(text="a b c d " * 60, max_tokens=200))
        for _ in range(6):
            await call.read()
        before = (await slow_client.load()).workers[0].steps
        call.cancel()
        await slow_client.assert_clean()
        assert (await slow_client.load()).workers[0].steps - before <= 5
    begin = time.monotonic()
    await slow_client.collect(pb.GenerateRequest(text="a b", max_tokens=2))
    assert time.monotonic() - begin < 1.0


async def test_a_client_that_stops_reading_and_cancels_leaves_nothing(slow_client: Client) -> None:
    call = slow_client.stream(pb.GenerateRequest(text="a b c d " * 60, max_tokens=200))
    await call.read()
    await asyncio.sleep(0.3)  # the server goes on writing to someone who does not read
    call.cancel()
    await slow_client.assert_clean()


async def test_a_storm_of_disconnects_leaves_nothing(client: Client) -> None:
    rng = random.Random(3)

    async def one(index: int) -> None:
        request = pb.GenerateRequest(text=f"{index} " + "storm " * 50, max_tokens=60)
        call = client.stream(request)
        try:
            for _ in range(rng.randrange(4)):
                if await call.read() is grpc.aio.EOF:
                    return
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()

    for _ in range(5):
        await asyncio.gather(*(one(index) for index in range(60)))
    await client.assert_clean()
    assert (await client.collect(pb.GenerateRequest(text="calm"))).text == "calm"
