"""Draining: refuse what is new, finish what lives, be gone in time."""

import asyncio
import os
import signal
import sys

import grpc
import pytest

from gateway.config import GatewayConfig, load_config
from gateway.server import AddressInUseError, running_gateway
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import collect
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker
from tests.gateway.fake_worker import FakeWorker

Status = grpc.StatusCode


class Drained:
    """A gateway that is told to stop by leaving its block, at a moment of the test's choice."""

    def __init__(self, worker: FakeWorker, grace_s: float) -> None:
        self._config = GatewayConfig(
            listen="127.0.0.1:0", workers=(worker.address,), drain_grace_s=grace_s
        )
        self.stop = asyncio.Event()
        self.ready: asyncio.Future[GatewayUnderTest] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        async with running_gateway(self._config) as running:
            self.ready.set_result(GatewayUnderTest(running))
            await self.stop.wait()


async def test_a_draining_gateway_refuses_new_requests_and_finishes_live_ones(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echoes=False) as worker, asyncio.TaskGroup() as tasks:
        drained = Drained(worker, grace_s=10)
        task = tasks.create_task(drained.run())
        async with await drained.ready as gateway:
            await gateway.until_ready(1)
            call = gateway.stream(text("x"))
            request = await worker.request()
            request.start()
            await call.read()
            drained.stop.set()
            await gateway.until_serving(False)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await gateway.collect(text("late"))
            assert caught.value.code() == Status.UNAVAILABLE
            assert not task.done()
            request.send_tokens([100])
            request.finish()
            assert list((await call.read()).delta.token_ids) == [100]
            assert (await call.read()).finished.finish_reason == pb.FINISH_REASON_LENGTH
            async with asyncio.timeout(5):
                await task


async def test_what_lives_at_the_end_of_the_grace_is_unavailable(make_worker: MakeWorker) -> None:
    async with make_worker(echoes=False) as worker, asyncio.TaskGroup() as tasks:
        drained = Drained(worker, grace_s=0.1)
        task = tasks.create_task(drained.run())
        async with await drained.ready as gateway:
            await gateway.until_ready(1)
            call = gateway.stream(text("x"))
            request = await worker.request()
            drained.stop.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call)
            assert caught.value.code() == Status.UNAVAILABLE
            assert "shut down" in (caught.value.details() or "")
            await worker.until(lambda: request.abort_reply is False)
            async with asyncio.timeout(5):
                await task


async def test_a_worker_lost_in_the_moment_of_the_shutdown_holds_nothing_up(
    make_worker: MakeWorker,
) -> None:
    now = asyncio.get_running_loop().time
    for _ in range(5):
        async with make_worker() as worker:
            async with asyncio.timeout(20), running_gateway(without_grace(worker)) as running:
                async with GatewayUnderTest(running) as gateway:
                    await gateway.until_ready(1)
                await worker.crash()
                lost_at = now()
            assert now() - lost_at < 3


def without_grace(worker: FakeWorker) -> GatewayConfig:
    return GatewayConfig(listen="127.0.0.1:0", workers=(worker.address,), drain_grace_s=0)


async def process(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, stderr=asyncio.subprocess.PIPE
    )


async def test_the_process_exits_0_on_sigterm(make_worker: MakeWorker) -> None:
    async with make_worker() as worker:
        gateway = await process("--workers", worker.address, "--listen", "127.0.0.1:0")
        assert gateway.stderr is not None
        async with asyncio.timeout(20):
            while b"worker ready" not in (line := await gateway.stderr.readline()):
                assert line, "the gateway ended"
            gateway.send_signal(signal.SIGTERM)
            assert await gateway.wait() == 0


async def test_a_taken_port_is_one_line_and_a_failure(make_worker: MakeWorker) -> None:
    async with make_worker() as worker:
        gateway = await process("--listen", worker.address)
        async with asyncio.timeout(20):
            _, stderr = await gateway.communicate()
        assert gateway.returncode == 2
        assert f"cannot listen on {worker.address}" in stderr.decode()
        assert "Traceback" not in stderr.decode()
        with pytest.raises(AddressInUseError):
            async with running_gateway(GatewayConfig(listen=worker.address)):
                pass


def test_importing_the_gateway_brings_no_torch() -> None:
    code = (
        "import sys, gateway.server; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


def test_flags_lists_and_secrets_are_read() -> None:
    config = load_config(
        [
            "--workers",
            "a:1,b:2",
            "--tokens",
            "sesame,abracadabra",
            "--drain-grace-s",
            "3",
            "--listen",
            "x:1",
        ]
    )
    assert config.workers == ("a:1", "b:2")
    assert [token.get_secret_value() for token in config.tokens] == ["sesame", "abracadabra"]
    assert "sesame" not in repr(config)
    assert (config.drain_grace_s, config.listen) == (3, "x:1")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--drain-grace-s", "soon"], "--drain-grace-s"),
        (["--max-live-requests", "0"], "--max-live-requests"),
        (["--workers", ""], "--workers"),
        (["--what"], "--what"),
    ],
)
def test_a_wrong_setting_is_named_and_ends_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
