"""Workers behind a gateway: replaced under load, killed, found by name, and chosen by prefix."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from shared.notifier import Notifier
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.conftest import ECHO, StartPair
from tests.integration.pair import Client, Service
from tests.ports import free_port

SLOW = (*ECHO[:-1], "10")
Status = grpc.StatusCode


class Load:
    """Clients that stream one request after another, and note whatever is not right."""

    def __init__(self, client: Client, num_clients: int) -> None:
        self.num_done = 0
        self.faults: list[str] = []
        self._client = client
        self._num_clients = num_clients
        self._stopped = False
        self._progress = Notifier()

    async def __aenter__(self) -> "Load":
        self._running = asyncio.gather(*(self._loop(i) for i in range(self._num_clients)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await self._running

    async def more(self, count: int) -> None:
        """Returns when so many more requests are done."""
        target = self.num_done + count
        async with asyncio.timeout(60):
            await self._progress.until(lambda: self.num_done >= target or bool(self.faults))

    async def _loop(self, number: int) -> None:
        index = 0
        while not self._stopped:
            index += 1
            text = f"client {number} asks {index} for an echo of this text " * 3
            try:
                answer = await self._client.collect(pb.GenerateRequest(text=text, max_tokens=200))
            except grpc.aio.AioRpcError as error:
                self.faults.append(f"{error.code()}: {error.details()}")
            else:
                if answer.text != text:
                    self.faults.append(f"another text: {answer.text}")
            self.num_done += 1
            self._progress.notify()


async def test_workers_are_drained_and_replaced_under_load_without_a_failed_request(
    start_pair: StartPair,
) -> None:
    with start_pair(SLOW, num_workers=2) as pair:
        async with Client(pair.address) as client:
            async with Load(client, num_clients=12) as load:
                await load.more(12)
                await _replace(pair.workers[0])
                await load.more(24)
                # The other way: told to drain, it ends by SIGTERM when it has nothing left.
                async with grpc.aio.insecure_channel(pair.workers[1].address) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    await stub.Drain(worker_pb2.DrainRequest())
                await load.more(24)
                await _replace(pair.workers[1])
                await load.more(24)
            assert load.faults == []
            assert load.num_done > 80
            # Both new ones have had their part.
            workers = (await client.load()).workers
            assert all(worker.ready and worker.steps > 10 for worker in workers)
            await client.assert_clean()


async def _replace(worker: Service) -> None:
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.process.wait, 20) == 0
    worker.start()
    await asyncio.to_thread(worker.wait_serving)


async def test_requests_without_a_token_outlive_a_worker_that_is_killed(
    start_pair: StartPair,
) -> None:
    # Room for two at once, so that most wait when one of the workers is killed.
    args = (*ECHO[:-1], "50", "--max-running", "2")
    with start_pair(args, num_workers=2) as pair:
        async with Client(pair.address) as client:
            texts = [f"{number} one two three four five six seven" for number in range(16)]
            requests = [pb.GenerateRequest(text=text, max_tokens=64) for text in texts]
            answers = asyncio.gather(*map(client.collect, requests), return_exceptions=True)
            await _until_busy(client)
            pair.workers[0].process.kill()
            results = await answers
            outcomes: Counter[str] = Counter()
            for text, result in zip(texts, results, strict=True):
                if isinstance(result, grpc.aio.AioRpcError):
                    assert result.code() is Status.UNAVAILABLE
                    assert "token" in (result.details() or "")
                    outcomes["lost after its first token"] += 1
                else:
                    assert not isinstance(result, BaseException)
                    assert result.text == text
                    outcomes["whole"] += 1
            # Only what ran on it could be lost.
            assert outcomes["lost after its first token"] <= 2
            pair.workers[0].process.wait()
            pair.workers[0].start()
            await asyncio.to_thread(pair.workers[0].wait_serving)
            await asyncio.to_thread(pair.wait_linked)
            await client.assert_clean()


async def _until_busy(client: Client) -> None:
    async with asyncio.timeout(20):
        while True:
            workers = (await client.load()).workers
            if all(worker.running == 2 and worker.waiting > 2 for worker in workers):
                return
            await asyncio.sleep(0.02)


async def test_a_name_is_resolved_and_its_workers_serve(
    start_pair: StartPair, tmp_path: Path
) -> None:
    with start_pair(ECHO) as pair:
        port = pair.workers[0].address.rpartition(":")[2]
        async with _second_gateway(f"dns:///localhost:{port}", tmp_path) as client:
            answer = await client.collect(pb.GenerateRequest(text="by name", max_tokens=9))
            assert answer.text == "by name"
            await client.assert_clean()


async def test_prompts_that_another_gateway_sent_are_found_where_they_are_cached(
    start_pair: StartPair, tmp_path: Path
) -> None:
    with start_pair(ECHO, num_workers=2) as pair:
        # By other addresses, so that no hash of theirs could lead to the same worker.
        names = ",".join(w.address.replace("127.0.0.1", "localhost") for w in pair.workers)
        texts = [f"{number} is a prompt of its own. " + "word " * 100 for number in range(12)]
        async with (
            Client(pair.address) as first,
            _second_gateway(names, tmp_path) as second,
        ):
            used = set()
            for text in texts:
                answer = await first.collect(pb.GenerateRequest(text=text, max_tokens=1))
                assert answer.finished.usage.cached_tokens < 32
            for worker in (await first.load()).workers:
                used.add(worker.pages_cached > 10)
            assert used == {True}, "one worker got everything"
            # Twice a second, and nobody tells of it.
            await asyncio.sleep(1.5)
            # In another order, so that turns do not lead to the same workers either.
            for text in random.Random(0).sample(texts, len(texts)):
                answer = await second.collect(pb.GenerateRequest(text=text, max_tokens=1))
                assert answer.finished.usage.cached_tokens > 90
            await first.assert_clean()


@asynccontextmanager
async def _second_gateway(workers: str, folder: Path) -> AsyncIterator[Client]:
    """Another gateway for workers that are up, and a client of it."""
    gateway = Service(
        "gateway",
        ["--workers", workers, "--processes", "1"],
        f"127.0.0.1:{free_port()}",
        folder / "second_gateway.log",
    )
    gateway.start()
    try:
        await asyncio.to_thread(gateway.wait_serving)
        async with Client(gateway.address) as client:
            yield client
    finally:
        await asyncio.to_thread(gateway.stop)
