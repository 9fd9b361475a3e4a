"""A worker process: exit codes, drain on SIGTERM, the second signal, no process left."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from shared.errors import Code
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.front.harness import TIMEOUT_S, GatewayLink


@dataclass
class WorkerProcess:
    """`python -m worker` and what it logs."""

    process: asyncio.subprocess.Process

    async def log_until(self, event: str, **fields: object) -> dict[str, object]:
        """Reads the log up to the line of this event with these fields."""
        assert self.process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            async for line in self.process.stderr:
                entry: dict[str, object] = json.loads(line)
                if entry["event"] == event and fields.items() <= entry.items():
                    return entry
        raise AssertionError(f"the log ended without {event}")

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    async def exit_code(self, timeout_s: float = TIMEOUT_S) -> int:
        return await asyncio.wait_for(self.process.wait(), timeout_s)


@asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[WorkerProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "worker", "--log-format", "json", "--engine", "echo"),
        *("--listen", "127.0.0.1:0", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield WorkerProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def connected(worker: WorkerProcess) -> AsyncIterator[pb_grpc.WorkerServiceStub]:
    port = (await worker.log_until("listening"))["port"]
    await worker.log_until("health", serving=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.WorkerServiceStub(channel)


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them end; multiprocessing's resource tracker does so a moment after its parent."""
    assert psutil.wait_procs(processes, timeout=5)[1] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_worker_leaves_at_once_and_leaves_no_process(
    number: signal.Signals, tokenizer_folder: Path
) -> None:
    async with worker_process("--model", str(tokenizer_folder)) as worker:
        async with connected(worker):
            children = worker.children()
            worker.process.send_signal(number)
            assert await worker.exit_code(5) == 0
        assert children
        assert_gone(children)


async def test_a_drain_refuses_new_requests_and_lets_the_live_ones_end(
    tokenizer_folder: Path,
) -> None:
    arguments = ("--model", str(tokenizer_folder), "--echo-step-ms", "20", "--drain-grace-s", "20")
    async with worker_process(*arguments) as worker, connected(worker) as stub:
        link = GatewayLink(stub)
        for handle in range(2):
            await link.submit(handle, range(10, 50))
        await link.until(lambda: bool(link[0].token_ids and link[1].token_ids))
        worker.process.send_signal(signal.SIGTERM)
        await link.until(lambda: not link.loads[-1].ready)
        await link.submit(2)
        assert (await link.outcome(2)).failure.code == Code.UNAVAILABLE
        for handle in range(2):
            assert (await link.outcome(handle)).token_ids == list(range(10, 50))
            assert link[handle].reason == pb.FINISH_REASON_EOS
        assert await link.ending() is grpc.StatusCode.UNAVAILABLE
        assert await worker.exit_code(5) == 0


async def test_after_the_grace_what_still_lives_is_unavailable(tokenizer_folder: Path) -> None:
    arguments = ("--model", str(tokenizer_folder), "--echo-step-ms", "50")
    async with (
        worker_process(*arguments, "--drain-grace-s", "0.3") as worker,
        connected(worker) as stub,
    ):
        link = GatewayLink(stub)
        await link.submit(1, range(10, 500), max_tokens=600)
        await link.until(lambda: len(link[1].token_ids) > 0)
        worker.process.send_signal(signal.SIGTERM)
        failure = (await link.outcome(1)).failure
        assert failure.code == Code.UNAVAILABLE
        assert failure.message == "worker is shutting down"
        assert await worker.exit_code(5) == 0


async def test_a_second_signal_ends_the_process_and_its_engine_at_once(
    tokenizer_folder: Path,
) -> None:
    arguments = ("--model", str(tokenizer_folder), "--echo-step-ms", "100")
    async with worker_process(*arguments) as worker:
        async with connected(worker) as stub:
            children = worker.children()
            link = GatewayLink(stub)
            await link.submit(1, range(10, 500), max_tokens=600)
            await link.until(lambda: len(link[1].token_ids) > 0)
            worker.process.send_signal(signal.SIGTERM)
            await worker.log_until("draining")
            worker.process.send_signal(signal.SIGTERM)
            assert await worker.exit_code(1) == -signal.SIGTERM
        assert_gone(children)


async def test_a_signal_while_the_model_loads_ends_the_worker_at_once() -> None:
    async with worker_process("--engine", "cpu") as worker:
        await worker.log_until("listening")
        children = worker.children()
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_code(5) == 0
        assert_gone(children)


async def test_a_sigint_while_the_engine_is_spawned_ends_the_worker_like_a_sigterm(
    tokenizer_folder: Path,
) -> None:
    async with worker_process("--model", str(tokenizer_folder)) as worker:
        await worker.log_until("settings")
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.stderr is not None
        log = await asyncio.wait_for(worker.process.stderr.read(), TIMEOUT_S)
        # 0 where the loop was quicker than the signal.
        assert await worker.exit_code(5) in (-signal.SIGINT, 0)
        # Which multiprocessing would have met by waiting for the engine, for ever.
        assert b"KeyboardInterrupt" not in log


async def complaint_of(*arguments: str) -> tuple[int, str]:
    """Exit code and the last line of a worker that cannot start."""
    async with worker_process(*arguments) as worker:
        async with asyncio.timeout(TIMEOUT_S):
            _, log = await worker.process.communicate()
        assert b"Traceback" not in log
        assert worker.process.returncode is not None
        return worker.process.returncode, log.decode().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--page-size", "3"), "tandem worker: --page-size: Value error, must be a power of two"),
        (
            ("--engine", "abacus"),
            "tandem worker: --engine: Input should be 'cpu', 'cuda' or 'echo'",
        ),
        (
            ("--max-running", "many"),
            "tandem worker: --max-running: Input should be a valid integer",
        ),
        (("--no-such-flag",), "tandem worker: error: unrecognized arguments"),
        (("--model", "/no/such/folder"), "tandem worker: /no/such/folder is not a folder"),
        (("--engine", "cuda", "--dtype", "float32"), "tandem worker: the cuda engine computes in"),
    ],
)
async def test_a_bad_configuration_exits_with_2_and_one_clear_line(
    arguments: tuple[str, ...], complaint: str
) -> None:
    exit_code, last_line = await complaint_of(*arguments)
    assert exit_code == 2
    assert last_line.startswith(complaint)


async def test_a_pool_too_small_for_one_context_is_a_bad_configuration(
    tokenizer_folder: Path,
) -> None:
    exit_code, last_line = await complaint_of(
        "--model", str(tokenizer_folder), "--kv-pages", "4", "--max-context", "1000"
    )
    assert exit_code == 2
    assert "4 pages of 16 tokens cannot hold one context of 1000" in last_line


@pytest.mark.parametrize("flag", ["--listen", "--metrics-port"])
async def test_a_taken_port_exits_with_2_and_names_the_flag(
    flag: str, tokenizer_folder: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = f"127.0.0.1:{port}" if flag == "--listen" else str(port)
        exit_code, last_line = await complaint_of("--model", str(tokenizer_folder), flag, value)
    assert exit_code == 2
    assert last_line.startswith(f"tandem worker: {flag}: cannot listen on")
