"""Random gateways against one worker: every request ends once, every page comes back."""

import asyncio
import random

import pytest

from shared.errors import Code
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.worker.front.conftest import MakeWorker
from tests.worker.front.harness import FrontWorker

NUM_REQUESTS = 120


class RandomGateway:
    """Submits, aborts both ways, and leaves; remembers what must come of each request."""

    def __init__(self, worker: FrontWorker, number: int, seed: int) -> None:
        self._link = worker.link()
        self._number = number
        self._random = random.Random(seed * 100 + number)
        self._prompts: dict[int, list[int]] = {}
        self._silenced: set[int] = set()

    async def run(self) -> None:
        for handle in range(NUM_REQUESTS):
            await self._submit(handle)
            match self._random.randrange(6):
                case 0:
                    await self._link.abort(self._some_handle(), reply=True)
                case 1:
                    handle = self._some_handle()
                    self._silenced.add(handle)
                    await self._link.abort(handle, reply=False)
                case 2:
                    await self._link.hear_one()
        if self._random.randrange(3) == 0:
            self._link.call.cancel()
            return
        await self._link.until(self._is_over)
        for handle in self._prompts.keys() - self._silenced:
            self._check(handle)

    async def _submit(self, handle: int) -> None:
        length = self._random.randint(1, 60)
        # Few different beginnings, so that prompts share prefixes.
        self._prompts[handle] = [3 + self._random.randrange(3)] * length
        await self._link.submit(
            handle,
            self._prompts[handle],
            request_id=f"{self._number}-{handle}",
            max_tokens=self._random.randint(1, 64),
            time_limit_ms=self._random.choice((0, 0, 0, 20)),
        )

    def _some_handle(self) -> int:
        return self._random.choice(list(self._prompts))

    def _is_over(self) -> bool:
        link = self._link
        return all(link[handle].num_endings for handle in self._prompts.keys() - self._silenced)

    def _check(self, handle: int) -> None:
        outcome, prompt = self._link[handle], self._prompts[handle]
        assert outcome.num_endings == 1
        assert outcome.token_ids == prompt[: len(outcome.token_ids)]
        if outcome.failures:
            assert outcome.failure.code == Code.RESOURCE_EXHAUSTED
        elif outcome.reason == pb.FINISH_REASON_EOS:
            assert outcome.token_ids == prompt


@pytest.mark.parametrize("seed", range(3))
async def test_random_gateways_leave_nothing_behind(seed: int, make_worker: MakeWorker) -> None:
    settings = {"page_size": 4, "kv_pages": 80, "token_budget": 32, "overlap": seed != 1}
    async with make_worker(max_running=8, max_waiting=40, echo_step_ms=1, **settings) as worker:
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(RandomGateway(worker, number, seed).run())
        await worker.assert_clean()
        await worker.assert_next_works()
        await worker.assert_clean()
