"""Drain, crash, restart and slow readers, with real processes and real signals."""

import asyncio
import signal
import time
from contextlib import suppress

import grpc
import psutil

from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.integration.conftest import ECHO, StartPair
from tests.integration.pair import Client, Pair, rest_of

SLOW = (*ECHO[:-1], "20")


async def test_sigterm_lets_live_streams_finish(start_pair: StartPair) -> None:
    with start_pair(SLOW, ("--drain-grace-s", "10")) as pair:
        async with Client(pair.address) as client:
            text = "a b c d " * 18
            calls = [client.stream(pb.GenerateRequest(text=text, max_tokens=200)) for _ in "12"]
            for call in calls:
                await call.read()
            begin = time.monotonic()
            pair.gateway.signal(signal.SIGTERM)
            await asyncio.to_thread(pair.gateway.wait_serving, serving=False, timeout_s=1.0)
            async with Client(pair.address) as late:
                await _refused_within(late, 1.0)
            texts = ["".join([event.delta.text async for event in rest_of(call)]) for call in calls]
            assert texts == [text, text]
            assert await asyncio.to_thread(pair.gateway.process.wait, 10) == 0
            assert time.monotonic() - begin < 5


async def _refused_within(client: Client, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            await client.collect(pb.GenerateRequest(text="late", max_tokens=1))
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            return
        assert time.monotonic() < until, "a draining gateway still takes requests"


async def test_a_second_sigterm_exits_at_once(start_pair: StartPair) -> None:
    with start_pair(SLOW, ("--drain-grace-s", "30")) as pair:
        async with Client(pair.address) as client:
            call = client.stream(pb.GenerateRequest(text="a b c d " * 200, max_tokens=900))
            await call.read()
            pair.gateway.signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert pair.gateway.process.poll() is None
            begin = time.monotonic()
            pair.gateway.signal(signal.SIGTERM)
            await asyncio.to_thread(pair.gateway.process.wait, 10)
            assert time.monotonic() - begin < 3


async def test_a_draining_worker_finishes_what_it_has(start_pair: StartPair) -> None:
    with start_pair(SLOW) as pair:
        async with Client(pair.address) as client:
            text = "a b c d " * 15
            call = client.stream(pb.GenerateRequest(text=text, max_tokens=200))
            await call.read()
            pair.workers[0].signal(signal.SIGTERM)
            assert "".join([event.delta.text async for event in rest_of(call)]) == text
            assert await asyncio.to_thread(pair.workers[0].process.wait, 15) == 0


async def test_a_killed_worker_ends_its_streams_and_others_take_over(start_pair: StartPair) -> None:
    with start_pair(SLOW, num_workers=2) as pair:
        async with Client(pair.address) as client:
            call = client.stream(pb.GenerateRequest(text="a b c d " * 100, max_tokens=400))
            delivered = 0
            while delivered < 3:
                event = await call.read()
                assert isinstance(event, pb.GenerateStreamResponse)
                delivered += len(event.delta.token_ids)
            victim = await _busy_worker(client, pair)
            pair.workers[victim].process.kill()
            begin = time.monotonic()
            try:
                async for event in rest_of(call):
                    delivered += len(event.delta.token_ids)
                raise AssertionError("the stream of a killed worker ended OK")
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert f"after {delivered} token" in (error.details() or "")
            assert time.monotonic() - begin < 2
            answers = await asyncio.gather(
                *(client.collect(pb.GenerateRequest(text=f"t{i}", max_tokens=9)) for i in range(8))
            )
            assert [answer.text for answer in answers] == [f"t{i}" for i in range(8)]
            pair.workers[victim].process.wait()
            pair.workers[victim].start()
            pair.workers[victim].wait_serving()
            await client.assert_clean(timeout_s=15)


async def _busy_worker(client: Client, pair: Pair) -> int:
    load = await client.load()
    busy = next(worker.address for worker in load.workers if worker.running)
    return next(i for i, worker in enumerate(pair.workers) if worker.address == busy)


async def test_a_killed_engine_fails_its_requests_and_comes_back(start_pair: StartPair) -> None:
    with start_pair(SLOW) as pair:
        async with Client(pair.address) as client:
            call = client.stream(pb.GenerateRequest(text="a b c d " * 100, max_tokens=400))
            await call.read()
            await call.read()
            _engine_of(pair).kill()
            try:
                async for _ in rest_of(call):
                    pass
                raise AssertionError("the stream of a killed engine ended OK")
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.INTERNAL, error.details()
            await asyncio.to_thread(pair.workers[0].wait_serving)
            await asyncio.to_thread(pair.gateway.wait_serving)
            assert (await client.collect(pb.GenerateRequest(text="back"))).text == "back"
            await client.assert_clean()


def _engine_of(pair: Pair) -> psutil.Process:
    children = psutil.Process(pair.workers[0].process.pid).children(recursive=True)
    engines = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    assert len(engines) == 1, engines
    return engines[0]


async def test_a_slow_reader_gets_its_whole_text_and_harms_nobody(start_pair: StartPair) -> None:
    with start_pair(ECHO) as pair:
        async with Client(pair.address) as slow, Client(pair.address) as quick:
            text = "one two three four five six seven eight nine ten " * 200
            ids = await slow.tokenize(text)
            request = pb.GenerateRequest(text=text, max_tokens=len(ids) + 1)
            call = slow.stream(request)
            events = [await call.read()]
            rss = psutil.Process(pair.gateway.process.pid).memory_info().rss
            begin = time.monotonic()
            for index in range(10):
                answer = await quick.collect(pb.GenerateRequest(text=f"q{index}", max_tokens=9))
                assert answer.text == f"q{index}"
                events.append(await call.read())
                await asyncio.sleep(0.1)
            assert time.monotonic() - begin < 10
            events += [event async for event in rest_of(call)]
            grown = psutil.Process(pair.gateway.process.pid).memory_info().rss - rss
            assert grown < 64 << 20
            read = [event for event in events if isinstance(event, pb.GenerateStreamResponse)]
            assert "".join(event.delta.text for event in read) == text
            assert read[-1].finished.usage.completion_tokens == len(ids) + 1
            await slow.assert_clean()


async def test_garbage_on_both_ports_harms_nobody(start_pair: StartPair) -> None:
    with start_pair(ECHO) as pair:
        for address in (pair.address, pair.workers[0].address):
            host, port = address.split(":")
            for payload in (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(payload)
                await writer.drain()
                # Some of it only makes the server wait for more.
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await reader.read()
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
        async with Client(pair.address) as client:
            assert (await client.collect(pb.GenerateRequest(text="fine"))).text == "fine"
            await client.assert_clean()
