"""The engine process dies, hangs or cannot start: nobody waits for ever."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from shared.errors import Code
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.worker.front.conftest import MakeWorker
from tests.worker.front.harness import NOT_SERVING, SERVING, running_worker
from worker.engine_process import EngineStartError
from worker.messages import Fatal


async def test_killing_the_engine_fails_what_lives_once_and_a_new_one_serves(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=50, max_running=6) as worker:
        first_model = await worker.stub.GetModel(pb.GetModelRequest())
        link = worker.link()
        for handle in range(6):
            await link.submit(handle, range(10, 60))
        await link.until(lambda: all(link[handle].token_ids for handle in range(6)))
        began = asyncio.get_running_loop().time()
        worker.signal_engine(signal.SIGKILL)
        for handle in range(6):
            failure = (await link.outcome(handle)).failure
            assert failure.code == Code.INTERNAL
            assert "engine" in failure.message
        assert asyncio.get_running_loop().time() - began < 1
        await worker.wait_health(SERVING)
        # The same stream goes on, with the ids and handles of the dead free again.
        await link.submit(10, [20, 21], request_id="request-0")
        assert (await link.outcome(10)).token_ids == [20, 21]
        assert all(link[handle].num_endings == 1 for handle in range(6))
        second_model = await worker.stub.GetModel(pb.GetModelRequest())
        assert first_model.instance_id != second_model.instance_id
        await worker.assert_clean()


async def test_a_hang_up_of_the_terminal_ends_no_engine(make_worker: MakeWorker) -> None:
    async with make_worker() as worker:
        before = await worker.stub.GetModel(pb.GetModelRequest())
        worker.signal_engine(signal.SIGHUP)
        link = worker.link()
        await link.submit(1, [20, 21])
        assert (await link.outcome(1)).token_ids == [20, 21]
        assert await worker.stub.GetModel(pb.GetModelRequest()) == before
        await worker.assert_clean()


async def test_a_request_that_waits_when_the_engine_dies_may_be_tried_elsewhere(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echo_step_ms=50, max_running=2) as worker:
        link = worker.link()
        for handle in range(4):
            await link.submit(handle, range(10, 60))
        await link.until(lambda: bool(link[0].token_ids and link[1].token_ids))
        worker.signal_engine(signal.SIGKILL)
        codes = [(await link.outcome(handle)).failure.code for handle in range(4)]
        assert codes == [Code.INTERNAL, Code.INTERNAL, Code.UNAVAILABLE, Code.UNAVAILABLE]
        await worker.wait_health(SERVING)
        await worker.assert_clean()


async def test_health_says_not_serving_while_there_is_no_engine(make_worker: MakeWorker) -> None:
    async with make_worker() as worker:
        link = worker.link()
        await link.until(lambda: len(link.loads) == 1)
        worker.signal_engine(signal.SIGKILL)
        await link.until(lambda: not link.loads[-1].ready)
        await worker.wait_health(NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.stub.GetModel(pb.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await worker.wait_health(SERVING)
        await link.until(lambda: link.loads[-1].ready)


async def test_a_silent_engine_is_not_serving_until_it_speaks_again(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(heartbeat_timeout_s=1.0) as worker:
        worker.signal_engine(signal.SIGSTOP)
        await worker.wait_health(NOT_SERVING)
        link = worker.link()
        await link.submit(1)
        assert (await link.outcome(1)).failure.code == Code.UNAVAILABLE
        worker.signal_engine(signal.SIGCONT)
        await worker.wait_health(SERVING)
        await worker.assert_next_works()


async def test_an_engine_that_hangs_is_killed_and_started_anew(make_worker: MakeWorker) -> None:
    async with make_worker(heartbeat_timeout_s=1.0, hang_timeout_s=2.0) as worker:
        link = worker.link()
        await link.submit(1, range(100, 160))
        await link.until(lambda: bool(link[1].token_ids))
        worker.signal_engine(signal.SIGSTOP)
        failure = (await link.outcome(1)).failure
        assert failure.code == Code.INTERNAL
        assert "engine" in failure.message
        await worker.wait_health(SERVING)
        await worker.assert_next_works()


async def test_an_engine_that_keeps_dying_ends_the_worker(tokenizer_folder: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with running_worker(
            tokenizer_folder, target=dies_at_once, wait_serving=False
        ) as worker:
            await asyncio.wait((worker.serving,))
    assert caught.group_contains(EngineStartError, match="5 times within 300 s")


async def test_a_model_that_cannot_be_opened_is_a_bad_configuration(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with running_worker(tmp_path, wait_serving=False) as worker:
            await asyncio.wait((worker.serving,))
    assert caught.group_contains(EngineStartError, match=f"{tmp_path} holds neither")
    assert len(worker.children) == 1


async def test_the_last_words_of_an_engine_are_the_reason(tokenizer_folder: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with running_worker(tokenizer_folder, target=gives_up, wait_serving=False) as worker:
            await asyncio.wait((worker.serving,))
    assert caught.group_contains(EngineStartError, match="^out of paper$")


def test_the_engine_dies_with_a_killed_front(tokenizer_folder: Path) -> None:
    arguments = ["--engine", "echo", "--model", str(tokenizer_folder), "--listen", "127.0.0.1:0"]
    front = subprocess.Popen(
        [sys.executable, "-m", "worker", "--log-format", "json", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert front.stderr is not None
    with front, front.stderr:
        for line in front.stderr:
            if '"serving": true' in line:
                break
        children = psutil.Process(front.pid).children()
        assert children
        front.kill()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive


def dies_at_once(config: object, parent_pid: int, connection: Any) -> None:
    sys.exit(3)


def gives_up(config: object, parent_pid: int, connection: Any) -> None:
    connection.send(Fatal("out of paper"))
    sys.exit(2)
