"""Deadlines hold whoever is frozen, and nothing runs on past them."""

import asyncio
import os
import signal
import time

import grpc
import pytest

from tests.faults.field import Field, engine_of
from tests.faults.ledger import Status
from tests.faults.load import echo_request, endless_request
from tests.integration.pair import Client, rest_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

PROMPT = list(range(1000, 1500))


@pytest.mark.parametrize("frozen", ["engines", "workers", "gateway"])
async def test_a_deadline_is_kept_while_a_process_is_frozen(frozen: str, field: Field) -> None:
    async with Client(field.street.address) as client:
        await client.collect(echo_request([1000]))
        stopped = {
            "engines": [engine.pid for worker in field.workers if (engine := engine_of(worker))],
            "workers": [worker.process.pid for worker in field.workers],
            "gateway": [field.gateway.process.pid],
        }[frozen]
        call = client.stream(endless_request(PROMPT), timeout_s=0.7)
        await call.read()
        await call.read()
        began = time.monotonic()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in rest_of(call):
                    pass
            assert time.monotonic() - began < 1.5
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert caught.value.code() is Status.DEADLINE_EXCEEDED
    # Its rest, of seconds, is not run.
    await field.settle()


async def test_deadlines_that_end_in_the_queue_and_in_the_batch_are_all_told_in_time(
    field: Field,
) -> None:
    """Most of them wait: the workers run 64 at once, and each takes a second."""

    async def one(index: int, client: Client) -> tuple[float, str]:
        timeout_s = 0.2 + 0.005 * index
        began = time.monotonic()
        try:
            await client.collect(echo_request([2000 + index, *PROMPT]), timeout_s=timeout_s)
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        return time.monotonic() - began - timeout_s, code

    async with Client(field.street.address) as client:
        endings = await asyncio.gather(*(one(index, client) for index in range(120)))
    assert {code for _, code in endings} <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert sum(code == "DEADLINE_EXCEEDED" for _, code in endings) > 60
    assert max(late for late, _ in endings) < 1.0
    await field.settle()
