"""Which of several workers a running gateway gives a request to."""

from gateway.affinity import PromptPrefix
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuietTwo


async def test_requests_go_to_the_worker_with_fewer(quiet_two: StartQuietTwo) -> None:
    async with quiet_two() as two:
        calls = [two.gateway.stream(text("x")) for _ in range(6)]
        await two.gateway.until(lambda: sum(two.num_requests) == 6)
        assert two.num_requests == [3, 3]
        await two.finish_all(*calls)


async def test_a_worker_whose_queue_is_known_to_be_full_is_passed_over(
    quiet_two: StartQuietTwo,
) -> None:
    # A prompt that is cached at the first worker, so that it would get the next one, too.
    prompt = "one two three four five six seven eight nine ten " * 5
    async with quiet_two(max_running=1, max_waiting=1) as two:
        calls = [two.gateway.stream(text(prompt)) for _ in range(4)]
        await two.gateway.until(lambda: sum(two.num_requests) == 4)
        assert two.num_requests == [2, 2]
        await two.finish_all(*calls)


async def test_a_worker_that_knows_fewer_tokens_is_no_other_of_the_same(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with make_worker() as one, make_worker() as other:
        other.model.vocab_size -= 1
        async with start_gateway(one, other) as gateway:
            for _ in range(4):
                await gateway.collect(text("x"))
            assert sorted([len(one.requests), len(other.requests)]) == [0, 4]


async def test_a_conversation_stays_with_its_worker_until_that_is_lost(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    talks = [f"{number} is a talk of its own, about this and that. " * 4 for number in range(6)]
    async with make_worker() as one, make_worker() as other, start_gateway(one, other) as gateway:
        for turn in range(3):
            for talk in talks:
                await gateway.collect(text(talk + "and so on " * 5 * turn, max_tokens=1))
        prompts = [[r.submit.prompt_token_ids[:40] for r in w.requests] for w in (one, other)]
        for own, others in (prompts, prompts[::-1]):
            assert all(own.count(prompt) == 3 and prompt not in others for prompt in own)
        worker = one if one.requests else other
        (link,) = (x for x in gateway.running.router.links if x.address == worker.address)
        prompt = PromptPrefix(worker.requests[0].submit.prompt_token_ids)
        assert link.prefixes.matched_tokens(prompt, link.page_size) >= 32
        await worker.crash()
        await gateway.until_ready(1)
        assert link.prefixes.matched_tokens(prompt, link.page_size) == 0


async def test_what_a_worker_tells_of_its_cache_reaches_the_router(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    prompt = PromptPrefix(range(100))
    async with make_worker() as worker, start_gateway(worker) as gateway:
        (link,) = gateway.running.router.links

        def matched() -> int:
            return link.prefixes.matched_tokens(prompt, link.page_size)

        assert matched() == 0
        worker.report_prefixes([prompt.names(link.page_size)[2]])
        await gateway.until(lambda: matched() != 0)
        assert matched() == 48
        worker.report_prefixes([])
        await gateway.until(lambda: matched() != 48)
        assert matched() == 0
