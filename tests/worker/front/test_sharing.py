"""The front's part of fair shares, and of what gateways are told of the cache."""

import asyncio
from array import array

from shared.errors import Code
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.prefix_hashes import fingerprint, page_hashes, root_hash
from tests.worker.front.conftest import MakeWorker
from tests.worker.front.harness import FrontWorker


async def test_a_full_queue_makes_room_for_a_client_with_less_in_it_at_once(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=300) as worker:
        greedy, modest = worker.link(), worker.link()
        for handle in range(8):
            await greedy.submit(handle, [10], client="greedy")
        await greedy.until(lambda: all(greedy[handle].accepted for handle in range(8)))
        await greedy.until(lambda: greedy[3].started == 1)
        began = asyncio.get_running_loop().time()
        await modest.submit(100, [11], request_id="m0", client="modest")
        await modest.submit(101, [11], request_id="m1", client="modest")
        await modest.until(lambda: modest[101].accepted)
        # Its newest ones had to go.
        for handle in (7, 6):
            failure = (await greedy.outcome(handle)).failure
            assert (failure.code, failure.retry_after_ms) == (Code.RESOURCE_EXHAUSTED, 1000)
        # Now both have two in the queue, and it is full for either.
        await modest.submit(102, [11], request_id="m2", client="modest")
        await greedy.submit(8, [10], client="greedy")
        assert (await modest.outcome(102)).failure.code == Code.RESOURCE_EXHAUSTED
        assert (await greedy.outcome(8)).failure.code == Code.RESOURCE_EXHAUSTED
        assert asyncio.get_running_loop().time() - began < 0.2
        for handle in range(6):
            assert (await greedy.outcome(handle)).reason == pb.FINISH_REASON_EOS
        for handle in (100, 101):
            assert (await modest.outcome(handle)).token_ids == [11]
        await worker.assert_clean()


async def test_a_waiting_request_of_a_higher_priority_is_not_displaced(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=100) as worker:
        link = worker.link()
        for handle in range(8):
            await link.submit(handle, [10], client="greedy", priority=1)
        await link.submit(100, [11], client="modest")
        assert (await link.outcome(100)).failure.code == Code.RESOURCE_EXHAUSTED
        await link.submit(101, [11], client="modest", priority=1)
        assert (await link.outcome(101)).token_ids == [11]
        assert sum(bool(link[handle].failures) for handle in range(8)) == 1
        await worker.assert_clean()


async def test_gateways_are_told_what_is_cached_those_that_come_later_too(
    worker: FrontWorker,
) -> None:
    prompt = list(range(10, 60))
    hashes = page_hashes(root_hash(""), array("i", prompt).tobytes(), 4 * 16)
    expected = {fingerprint(one) for one in hashes}
    link = worker.link()
    await link.submit(1, prompt)
    await link.outcome(1)
    await link.until(lambda: bool(link.prefixes and link.prefixes[-1]))
    assert expected <= set(memoryview(link.prefixes[-1]).cast("I"))
    late = worker.link()
    await late.until(lambda: bool(late.prefixes))
    assert late.prefixes == [link.prefixes[-1]]
    await worker.stub.FlushCache(pb.FlushCacheRequest())
    await late.until(lambda: late.prefixes[-1] == b"")
