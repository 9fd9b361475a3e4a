"""Every kind of fault: what is done to the services, and which endings it may cause."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
import psutil

from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2 as worker_pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as worker_pb_grpc
from tests.faults import frames
from tests.faults.field import Field, engine_of
from tests.faults.ledger import ALWAYS, Ledger, Status
from tests.faults.load import Manner, connected, echo_request, endless_request, random_prompt, send
from tests.integration.pair import MAX_MESSAGE_BYTES, Service

GENERATE_STREAM = "/tandem.v1.InferenceService/GenerateStream"
RUN = "/tandem.worker.v1.WorkerService/Run"
_LOST = frozenset({"UNAVAILABLE"})
_ENGINE_LOST = frozenset({"UNAVAILABLE", "INTERNAL"})
_OVERSIZED_BYTES = 33 << 20

Inject = Callable[[Field, Ledger, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault; `inject` returns when the services have been left alone again."""

    name: str
    inject: Inject
    # Endings that only this fault excuses.
    excused: frozenset[str] = frozenset()

    @property
    def allowed(self) -> frozenset[str]:
        return ALWAYS | self.excused


async def kill_engine(field: Field, ledger: Ledger, rng: random.Random) -> None:
    engine = engine_of(rng.choice(field.workers))
    if engine is not None:
        with suppress(psutil.NoSuchProcess):
            engine.kill()


async def kill_worker(field: Field, ledger: Ledger, rng: random.Random) -> None:
    await field.kill(rng.choice(field.workers))


async def kill_gateway(field: Field, ledger: Ledger, rng: random.Random) -> None:
    await field.kill(field.gateway)


async def pause_engine(field: Field, ledger: Ledger, rng: random.Random) -> None:
    engine = engine_of(rng.choice(field.workers))
    if engine is not None:
        with suppress(psutil.NoSuchProcess):
            engine.suspend()
            await asyncio.sleep(rng.uniform(0.3, 1.5))
            engine.resume()


async def pause_worker(field: Field, ledger: Ledger, rng: random.Random) -> None:
    await _pause(rng.choice(field.workers), rng.uniform(0.3, 1.5))


async def pause_gateway(field: Field, ledger: Ledger, rng: random.Random) -> None:
    await _pause(field.gateway, rng.uniform(0.3, 1.5))


async def hang_worker(field: Field, ledger: Ledger, rng: random.Random) -> None:
    """For longer than the gateway waits for a sign of it."""
    await _pause(rng.choice(field.workers), 4.0)


async def hang_engine(field: Field, ledger: Ledger, rng: random.Random) -> None:
    """For ever: the front gives it up."""
    engine = engine_of(rng.choice(field.workers))
    if engine is not None:
        with suppress(psutil.NoSuchProcess):
            engine.suspend()
            await asyncio.to_thread(psutil.wait_procs, [engine], 12)


async def slow_street(field: Field, ledger: Ledger, rng: random.Random) -> None:
    field.street.delay_s = 0.1
    await asyncio.sleep(1.0)
    field.street.delay_s = 0.0


async def slow_hop(field: Field, ledger: Ledger, rng: random.Random) -> None:
    hop = rng.choice(field.hops)
    hop.delay_s = 0.1
    await asyncio.sleep(1.0)
    hop.delay_s = 0.0


async def silent_street(field: Field, ledger: Ledger, rng: random.Random) -> None:
    field.street.stall()
    await asyncio.sleep(rng.uniform(0.5, 1.5))
    field.street.resume()


async def silent_hop(field: Field, ledger: Ledger, rng: random.Random) -> None:
    """For longer than the gateway waits for a sign of the worker."""
    hop = rng.choice(field.hops)
    hop.stall()
    await asyncio.sleep(4.0)
    hop.resume()


async def cut_street(field: Field, ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        field.street.cut()
        await asyncio.sleep(0.2)


async def cut_hop(field: Field, ledger: Ledger, rng: random.Random) -> None:
    for _ in range(3):
        rng.choice(field.hops).cut()
        await asyncio.sleep(0.2)


async def malformed_frames(field: Field, ledger: Ledger, rng: random.Random) -> None:
    """Everything at once on both services' ports."""
    shots = [(field.gateway, payload) for payload in frames.payloads(GENERATE_STREAM.encode(), rng)]
    shots += [(field.workers[0], payload) for payload in frames.payloads(RUN.encode(), rng)]
    await asyncio.gather(*(_shoot(service.address, payload) for service, payload in shots))


async def oversized_messages(field: Field, ledger: Ledger, rng: random.Random) -> None:
    await asyncio.gather(
        _expect_refusal(field.gateway, GENERATE_STREAM, _large_request(), ledger),
        _expect_refusal(field.workers[0], RUN, _large_command(), ledger),
    )


async def full_queue(field: Field, ledger: Ledger, rng: random.Random) -> None:
    """Far more than run and wait; those who are refused are told when to come again."""
    async with connected(field.street.address) as stubs:

        async def one(index: int) -> None:
            call = stubs[index % len(stubs)].Generate(echo_request(random_prompt(rng)), timeout=30)
            try:
                await call
                ledger.end("OK")
            except grpc.aio.AioRpcError as error:
                ledger.end(error.code().name, error.details() or "")
                details = dict(error.trailing_metadata() or ())
                if error.code() is Status.RESOURCE_EXHAUSTED and not any(
                    key == "grpc-status-details-bin" for key in details
                ):
                    ledger.violate("a refusal without the time to come again")

        await asyncio.gather(*(one(index) for index in range(400)))


async def disconnects(
    field: Field, ledger: Ledger, rng: random.Random, *, total: int = 300, at_once: int = 32
) -> None:
    """Clients that leave: before the first event, amid the stream, and connection and all."""
    left = iter(range(total))

    async def leaver() -> None:
        for _ in left:
            async with connected(field.street.address) as stubs:
                for stub in stubs:
                    if next(left, None) is None:
                        return
                    await send(stub, Manner.LEAVES, ledger, rng)
                # Closing the connections takes this one along.
                stubs[0].GenerateStream(endless_request(random_prompt(rng)), timeout=20)
                ledger.end("CANCELLED")
                await asyncio.sleep(rng.uniform(0, 0.02))

    await asyncio.gather(*(leaver() for _ in range(at_once)))


async def short_deadlines(field: Field, ledger: Ledger, rng: random.Random) -> None:
    async with connected(field.street.address) as stubs:
        await asyncio.gather(
            *(send(stubs[i % len(stubs)], Manner.HURRIES, ledger, rng) for i in range(120))
        )


async def slow_readers(field: Field, ledger: Ledger, rng: random.Random) -> None:
    async with connected(field.street.address) as stubs:
        await asyncio.gather(
            *(send(stubs[i % len(stubs)], Manner.DAWDLES, ledger, rng) for i in range(48))
        )


# Quick ones first; the last few take seconds by their nature.
KINDS = (
    Kind("kill the engine", kill_engine, _ENGINE_LOST),
    Kind("kill a worker", kill_worker, _LOST),
    Kind("kill the gateway", kill_gateway, _LOST),
    Kind("pause the engine", pause_engine),
    Kind("pause a worker", pause_worker),
    Kind("pause the gateway", pause_gateway),
    Kind("slow network to the gateway", slow_street),
    Kind("slow network to a worker", slow_hop),
    Kind("silent network to the gateway", silent_street),
    Kind("cut network to the gateway", cut_street, _LOST),
    Kind("cut network to a worker", cut_hop, _LOST),
    Kind("malformed frames", malformed_frames),
    Kind("messages of 33 MiB", oversized_messages),
    Kind("full queue", full_queue),
    Kind("disconnects", disconnects),
    Kind("short deadlines", short_deadlines),
    Kind("slow readers", slow_readers),
    Kind("hang a worker", hang_worker, _LOST),
    Kind("silent network to a worker", silent_hop, _LOST),
    Kind("hang the engine", hang_engine, _ENGINE_LOST),
)


async def _pause(service: Service, seconds: float) -> None:
    service.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        service.signal(signal.SIGCONT)


async def _shoot(address: str, payload: bytes) -> None:
    """Sends it and reads what comes; some of it only makes the server wait for more."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(1):
            writer.write(payload)
            await writer.drain()
            await reader.read()
    writer.transport.abort()


def _raw(
    channel: grpc.aio.Channel, method: str
) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
    """Takes and gives bytes as they are."""
    call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method, bytes)
    return call


def _large_request() -> bytes:
    return pb.GenerateRequest(text="x" * _OVERSIZED_BYTES).SerializeToString()


def _large_command() -> bytes:
    submit = worker_pb.Submit(handle=1, request_id="x" * _OVERSIZED_BYTES)
    return worker_pb.RunRequest(submit=submit).SerializeToString()


async def _expect_refusal(service: Service, method: str, message: bytes, ledger: Ledger) -> None:
    options = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
    async with grpc.aio.insecure_channel(service.address, options) as channel:
        try:
            if method == RUN:
                run = worker_pb_grpc.WorkerServiceStub(channel).Run(timeout=20)
                await run.write(worker_pb.RunRequest.FromString(message))
                while isinstance(await run.read(), worker_pb.RunResponse):
                    pass
                code = await run.code()
            else:
                async for _ in _raw(channel, method)(message, timeout=20):
                    pass
                code = Status.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
    if code is not Status.RESOURCE_EXHAUSTED:
        ledger.violate(f"{len(message)} bytes to {method} ended {code}")
