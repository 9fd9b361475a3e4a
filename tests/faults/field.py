"""Two workers and a gateway with a network before each, and what must hold when all is well."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.faults.load import echo_request
from tests.faults.proxy import TcpProxy
from tests.integration.pair import Client, Service, is_clean
from tests.ports import free_port

WORKER = (
    *("--engine", "echo", "--echo-step-ms", "2", "--max-context", "3072"),
    *("--max-running", "32", "--max-waiting", "64", "--kv-pages", "1536"),
    *("--heartbeat-timeout-s", "3", "--hang-timeout-s", "6"),
)
GATEWAY = (
    *("--processes", "1", "--worker-silence-limit-s", "3"),
    *("--slow-reader-limit-s", "5", "--breaker-cool-down-s", "1"),
)
_READY_TIMEOUT_S = 40.0
# Less than a request takes that nobody waits for and that is not ended.
_CLEAN_TIMEOUT_S = 4.0
_MIB = 1 << 20


@dataclass(slots=True)
class Field:
    """The services, the networks, and the ways to hurt and to heal them."""

    gateway: Service
    workers: Sequence[Service]
    # Between clients and the gateway.
    street: TcpProxy
    # Between the gateway and each worker.
    hops: Sequence[TcpProxy]

    @property
    def services(self) -> Sequence[Service]:
        return (*self.workers, self.gateway)

    async def repair(self) -> list[str]:
        """Starts again what has ended. Its names."""
        ended = [service for service in self.services if service.process.poll() is not None]
        for service in ended:
            service.start()
        for service in ended:
            await asyncio.to_thread(service.wait_serving)
        return [service.module for service in ended]

    async def kill(self, service: Service) -> None:
        """kill -9, and a new one on the same address."""
        service.process.kill()
        await asyncio.to_thread(service.process.wait, 10)
        service.start()

    async def settle(self) -> pb.GetLoadResponse:
        """Waits until every worker is ready, nothing runs or waits, every page is back, and a
        request is answered right. Raises AssertionError when that takes too long.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_S
        await self.repair()
        is_ready = False
        while True:
            load = await self._ask(deadline)
            workers = load.workers
            if not is_ready and len(workers) == len(self.workers) and all(w.ready for w in workers):
                is_ready = True
                deadline = time.monotonic() + _CLEAN_TIMEOUT_S
            if (
                is_ready
                and load.live_requests == 0
                and all(w.ready and is_clean(w) for w in workers)
            ):
                break
            assert time.monotonic() < deadline, f"something was left behind: {load}"
            await asyncio.sleep(0.05)
        async with Client(self.street.address) as client:
            prompt = list(range(1000, 1040))
            answer = await client.collect(echo_request(prompt), timeout_s=10)
            assert answer.token_ids == prompt
        return load

    async def _ask(self, deadline: float) -> pb.GetLoadResponse:
        """A new connection each time: the one of before may be to a dead process."""
        while True:
            try:
                async with asyncio.timeout(5), Client(self.gateway.address) as client:
                    return await client.load()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                assert time.monotonic() < deadline, f"{error}\n{self.gateway.tail()}"
                await asyncio.sleep(0.1)

    def memory_mib(self) -> Mapping[tuple[str, int], float]:
        """Resident memory of every process, by service and process id."""
        found = {}
        for index, service in enumerate(self.services):
            root = psutil.Process(service.process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    kind = "engine" if process is not root else service.module
                    name = kind if service.module == "gateway" else f"{kind} {index}"
                    found[(name, process.pid)] = process.memory_info().rss / _MIB
        return found


def engine_of(worker: Service) -> psutil.Process | None:
    """The process that runs the steps; none while there is no engine."""
    try:
        children = psutil.Process(worker.process.pid).children(recursive=True)
        engines = [c for c in children if "resource_tracker" not in " ".join(c.cmdline())]
    except psutil.NoSuchProcess:
        return None
    return engines[0] if engines else None


@asynccontextmanager
async def running_field(
    folder: Path, tokenizer: Path, worker_args: Sequence[str] = (), *, num_workers: int = 2
) -> AsyncIterator[Field]:
    """Starts everything, waits until it serves, and stops it at the end."""
    async with AsyncExitStack() as stack:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(num_workers + 1)]
        street, *hops = [await stack.enter_async_context(TcpProxy(a)) for a in addresses]
        args = (*WORKER, "--model", str(tokenizer), *worker_args)
        workers = [
            Service("worker", args, address, folder / f"worker{index}.log")
            for index, address in enumerate(addresses[1:])
        ]
        links = ("--workers", ",".join(hop.address for hop in hops))
        gateway = Service("gateway", (*links, *GATEWAY), addresses[0], folder / "gateway.log")
        field = Field(gateway, workers, street, hops)
        for service in field.services:
            service.start()
            stack.push_async_callback(_stop, service)
        for service in field.services:
            await asyncio.to_thread(service.wait_serving)
        await field.settle()
        yield field


async def _stop(service: Service) -> None:
    if service.process.poll() is None:
        # In case that a test left it stopped.
        service.signal(signal.SIGCONT)
    await asyncio.to_thread(service.stop)
