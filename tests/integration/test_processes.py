"""Several gateway processes behind one port, with real processes and real signals."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.integration.conftest import ECHO, StartPair
from tests.integration.pair import Client, Pair, Stream, rest_of
from tests.ports import free_port

SLOW = (*ECHO[:-1], "20")
TWO = ("--processes", "2")
TEXT = "a b c d " * 18
STREAMS_OK = 'tandem_requests_total{method="GenerateStream",outcome="EOS"}'
Status = grpc.StatusCode


def processes_of(pair: Pair) -> list[psutil.Process]:
    """Those that serve, by slot."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process(pair.gateway.process.pid).children():
        # Gone, or not yet what it will be.
        with suppress(psutil.NoSuchProcess, ValueError):
            command = child.cmdline()
            found[int(command[command.index("gateway.process") + 2])] = child
    return [found[slot] for slot in sorted(found)]


def num_connections(process: psutil.Process, address: str) -> int:
    port = int(address.rpartition(":")[2])
    return sum(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in process.net_connections("tcp")
    )


def read_metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


@asynccontextmanager
async def client_of_each(pair: Pair) -> AsyncIterator[list[Client]]:
    """One client whose connection is with the first process, one with the second.

    Connections cannot choose: as many are made as it takes.
    """
    processes = processes_of(pair)
    found: dict[int, Client] = {}
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        while len(found) < len(processes):
            before = [num_connections(process, pair.address) for process in processes]
            client = await stack.enter_async_context(Client(pair.address))
            await client.load()
            after = [num_connections(process, pair.address) for process in processes]
            slots = [i for i in range(len(processes)) if after[i] > before[i]]
            if len(slots) == 1:
                found[slots[0]] = client
        yield [found[slot] for slot in range(len(processes))]


async def text_of(call: Stream) -> str:
    return "".join([event.delta.text async for event in rest_of(call)])


async def ended_with(call: Stream) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text_of(call)
    return caught.value


async def until_replaced(pair: Pair, former: psutil.Process) -> list[psutil.Process]:
    """The processes, once another has taken the former one's place and listens."""
    async with asyncio.timeout(15):
        while True:
            processes = processes_of(pair)
            if len(processes) == 2 and former not in processes:
                if all(listens(process, pair.address) for process in processes):
                    return processes
            await asyncio.sleep(0.02)


def listens(process: psutil.Process, address: str) -> bool:
    port = int(address.rpartition(":")[2])
    return any(
        connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        for connection in process.net_connections("tcp")
    )


async def assert_clean(pair: Pair) -> None:
    """Asks each process: each has its own count of live requests."""
    async with client_of_each(pair) as clients:
        for client in clients:
            await client.assert_clean()


@pytest.fixture(scope="module")
def two(start_pair: StartPair) -> Iterator[tuple[Pair, int]]:
    """Two processes that nobody kills, and their metrics port."""
    port = free_port()
    with start_pair(SLOW, (*TWO, "--metrics-port", str(port))) as pair:
        yield pair, port


async def test_many_connections_reach_both_and_the_metrics_are_sums(
    two: tuple[Pair, int],
) -> None:
    pair, port = two
    before = await asyncio.to_thread(read_metrics, port)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(pair.address)) for _ in range(32)]
        answers = await asyncio.gather(
            *(c.collect(pb.GenerateRequest(text=f"t{i}")) for i, c in enumerate(clients))
        )
        assert [answer.text for answer in answers] == [f"t{i}" for i in range(32)]
        counts = [num_connections(process, pair.address) for process in processes_of(pair)]
        assert sum(counts) >= 32 and all(counts), counts
    after = await asyncio.to_thread(read_metrics, port)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    for name, count in (
        (STREAMS_OK, 32),
        ("tandem_time_to_first_token_seconds_count", 32),
        ("tandem_generation_tokens_total", num_tokens),
    ):
        assert after[name] - before.get(name, 0) == count, name
    assert after["tandem_requests_live"] == 0
    assert after["tandem_workers_ready"] == 1
    assert after["tandem_gateway_processes"] == 2
    await assert_clean(pair)


def test_no_thread_may_throw_the_event_loop_off_its_core(two: tuple[Pair, int]) -> None:
    pair, _ = two
    for process in (*processes_of(pair), psutil.Process(pair.workers[0].process.pid)):
        policies = {t.id: os.sched_getscheduler(t.id) for t in process.threads()}
        assert policies.pop(process.pid) == os.SCHED_OTHER
        assert set(policies.values()) == {os.SCHED_BATCH}, (process.cmdline(), policies)


async def test_a_killed_process_takes_its_own_streams_and_comes_back(
    start_pair: StartPair,
) -> None:
    port = free_port()
    with start_pair(SLOW, (*TWO, "--metrics-port", str(port))) as pair:
        async with client_of_each(pair) as (doomed, other):
            victim = processes_of(pair)[0]
            request = pb.GenerateRequest(text=TEXT, max_tokens=200)
            await other.collect(pb.GenerateRequest(text="before", max_tokens=9))
            await doomed.collect(pb.GenerateRequest(text="before", max_tokens=9))
            lost, kept = doomed.stream(request), other.stream(request)
            for call in (lost, kept):
                await call.read()
                await call.read()
            live = await asyncio.to_thread(read_metrics, port)
            assert live["tandem_requests_live"] == 2
            victim.kill()
            assert (await ended_with(lost)).code() == Status.UNAVAILABLE
            assert TEXT.endswith(await text_of(kept))
            await until_replaced(pair, victim)
            # The channel's next connection goes to whoever listens.
            late = await doomed.collect(pb.GenerateRequest(text="after", max_tokens=9))
            assert late.text == "after"
            await other.assert_clean()
        metrics = await asyncio.to_thread(read_metrics, port)
        # What the dead process counted is still there; what it had live is not.
        assert metrics[STREAMS_OK] == 4
        assert metrics["tandem_requests_live"] == 0
        assert metrics["tandem_workers_ready"] == 1
        assert metrics["tandem_gateway_process_losses_total"] == 1
        await assert_clean(pair)


async def test_nothing_fails_while_a_killed_process_is_replaced(start_pair: StartPair) -> None:
    with start_pair(ECHO, TWO) as pair:
        victim = processes_of(pair)[1]
        victim.kill()
        await asyncio.to_thread(victim.wait, 5)
        async with asyncio.TaskGroup() as tasks:
            replaced = tasks.create_task(until_replaced(pair, victim))
            num_answers = 0
            while not replaced.done() or num_answers < 20:
                # A connection for each, which may come to the new one.
                async with Client(pair.address) as client:
                    request = pb.GenerateRequest(text=f"t{num_answers}", max_tokens=9)
                    answer = await client.collect(request)
                assert answer.text == f"t{num_answers}"
                num_answers += 1
        await assert_clean(pair)


async def test_sigterm_drains_both_processes(start_pair: StartPair) -> None:
    with start_pair(SLOW, (*TWO, "--drain-grace-s", "10")) as pair:
        async with client_of_each(pair) as clients:
            request = pb.GenerateRequest(text=TEXT, max_tokens=200)
            calls = [client.stream(request) for client in clients]
            for call in calls:
                await call.read()
            pair.gateway.signal(signal.SIGTERM)
            await asyncio.to_thread(pair.gateway.wait_serving, serving=False, timeout_s=1.0)
            for client in clients:
                error = await ended_with(client.stream(pb.GenerateRequest(text="late")))
                assert error.code() == Status.UNAVAILABLE
            assert [await text_of(call) for call in calls] == [TEXT, TEXT]
            assert await asyncio.to_thread(pair.gateway.process.wait, 10) == 0


async def test_a_second_signal_ends_all_at_once(start_pair: StartPair) -> None:
    with start_pair(SLOW, TWO) as pair:
        processes = processes_of(pair)
        async with Client(pair.address) as client:
            call = client.stream(pb.GenerateRequest(text=TEXT * 10, max_tokens=900))
            await call.read()
            pair.gateway.signal(signal.SIGTERM)
            await asyncio.to_thread(pair.gateway.wait_serving, serving=False, timeout_s=1.0)
            pair.gateway.signal(signal.SIGTERM)
            assert await asyncio.to_thread(pair.gateway.process.wait, 3) == -signal.SIGTERM
            assert (await ended_with(call)).code() == Status.UNAVAILABLE
            assert not any(process.is_running() for process in processes)


async def test_no_process_outlives_a_killed_parent(start_pair: StartPair) -> None:
    with start_pair(ECHO, TWO) as pair:
        processes = processes_of(pair)
        pair.gateway.process.kill()
        pair.gateway.process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=5)
        assert not alive
        pair.gateway.start()
        pair.gateway.wait_serving()
        await assert_clean(pair)


async def test_an_id_that_lives_in_another_process_is_taken(two: tuple[Pair, int]) -> None:
    pair, _ = two
    async with client_of_each(pair) as (first, second):
        request = pb.GenerateRequest(text=TEXT, max_tokens=200, request_id="twin")
        call = first.stream(request)
        await call.read()
        error = await ended_with(second.stream(request))
        assert error.code() == Status.ALREADY_EXISTS
        assert await text_of(call) == TEXT
        assert (await second.collect(request)).text == TEXT


async def test_abort_reaches_a_request_in_another_process(two: tuple[Pair, int]) -> None:
    pair, _ = two
    async with client_of_each(pair) as (first, second):
        request = pb.GenerateRequest(text=TEXT * 5, max_tokens=500, request_id="mine")
        call = first.stream(request)
        await call.read()
        answer = await second.stub.Abort(pb.AbortRequest(request_ids=["mine", "none"]))
        outcomes = {outcome.request_id: outcome.outcome for outcome in answer.outcomes}
        assert outcomes == {
            "mine": pb.AbortOutcome.OUTCOME_ABORTED,
            "none": pb.AbortOutcome.OUTCOME_NOT_FOUND,
        }
        events = [event async for event in rest_of(call)]
        assert events[-1].finished.finish_reason == pb.FINISH_REASON_ABORTED
    await assert_clean(pair)


def refused(*arguments: str) -> str:
    """What a gateway says that ends with 2."""
    ran = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_second_gateway_on_the_port_is_refused(two: tuple[Pair, int], processes: str) -> None:
    address = two[0].address
    said = refused("--listen", address, "--processes", processes)
    assert f"cannot listen on {address}" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--processes", "0"), "--processes"),
        (("--processes", "many"), "--processes"),
        (("--processes", "2", "--listen", "unix:/tmp/gateway.sock"), "need HOST:PORT"),
        (("--processes", "2", "--listen", "127.0.0.1:0", "--tls-cert", "none.pem"), "--tls-cert"),
    ],
)
def test_what_is_wrong_is_said_and_the_exit_code_is_2(
    arguments: Sequence[str], complaint: str, tmp_path: Path
) -> None:
    assert complaint in refused(*arguments)


def test_a_taken_metrics_port_is_said(two: tuple[Pair, int]) -> None:
    taken = str(two[1])
    assert "in use" in refused(*TWO, "--listen", "127.0.0.1:0", "--metrics-port", taken)
