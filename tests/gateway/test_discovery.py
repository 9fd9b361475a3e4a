"""Workers that come and go while the gateway runs."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.config import GatewayConfig
from gateway.discovery import (
    Discovery,
    DnsName,
    Endpoint,
    SystemResolver,
    worker_place,
)
from gateway.server import running_gateway
from tests.answers import collect
from tests.certificates import Authority
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker

POLL_S = 0.01


class FakeDns:
    """Names and their addresses, as a test sets them."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Collection[str] | OSError = addresses
        self.num_asked = 0

    async def resolve(self, name: DnsName) -> Collection[str]:
        self.num_asked += 1
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


@asynccontextmanager
async def gateway_with(
    dns: FakeDns, *, workers: tuple[str, ...] = ("dns:///worker:50052",), **settings: Any
) -> AsyncIterator[GatewayUnderTest]:
    config = GatewayConfig(
        listen="127.0.0.1:0",
        workers=workers,
        drain_grace_s=0.5,
        discovery_interval_s=POLL_S,
        **settings,
    )
    async with (
        running_gateway(config, resolver=dns) as running,
        GatewayUnderTest(running) as gateway,
    ):
        yield gateway
        await gateway.until_idle()


def addresses(gateway: GatewayUnderTest) -> set[str]:
    return {link.address for link in gateway.running.router.links}


def is_retired(gateway: GatewayUnderTest, address: str) -> bool:
    return any(x.is_retired for x in gateway.running.router.links if x.address == address)


async def test_a_name_stands_for_all_its_addresses_and_for_new_ones(
    make_worker: MakeWorker,
) -> None:
    async with make_worker() as one, make_worker() as two, make_worker() as three:
        dns = FakeDns(one.address, two.address)
        async with gateway_with(dns) as gateway:
            await gateway.until_ready(2)
            dns.addresses = (one.address, two.address, three.address)
            await gateway.until_ready(3)
            assert addresses(gateway) == {one.address, two.address, three.address}


async def test_a_worker_that_has_gone_finishes_what_it_has_and_gets_no_more(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echoes=False) as leaving, make_worker() as staying:
        dns = FakeDns(leaving.address)
        async with gateway_with(dns) as gateway:
            await gateway.until_ready(1)
            call = gateway.stream(text("x"))
            received = await leaving.request()
            received.start()
            received.send_tokens([100])
            assert (await call.read()).WhichOneof("event") == "started"
            dns.addresses = (staying.address,)
            await gateway.until(lambda: is_retired(gateway, leaving.address))
            await gateway.until_ready(1)
            for number in range(5):
                assert (await gateway.collect(text(f"new {number}"))).text == f"new {number}"
            assert addresses(gateway) == {leaving.address, staying.address}
            received.finish()
            assert (await call.read()).WhichOneof("event") == "delta"
            assert (await call.read()).finished.usage.completion_tokens == 1
            await gateway.until(lambda: addresses(gateway) == {staying.address})
            assert len(leaving.requests) == 1


async def test_the_last_worker_serves_until_its_successor_does(make_worker: MakeWorker) -> None:
    async with make_worker() as leaving, make_worker() as successor:
        await successor.crash()
        dns = FakeDns(leaving.address)
        async with gateway_with(dns) as gateway:
            await gateway.until_ready(1)
            dns.addresses = (successor.address,)
            await gateway.until(lambda: len(addresses(gateway)) == 2)
            for number in range(3):
                assert (await gateway.collect(text(f"still {number}"))).text == f"still {number}"
            await successor.start()
            await gateway.until(lambda: addresses(gateway) == {successor.address})
            assert (await gateway.collect(text("new"))).text == "new"
            assert (len(leaving.requests), len(successor.requests)) == (3, 1)


async def test_a_worker_that_comes_back_while_it_drains_is_used_again(
    make_worker: MakeWorker,
) -> None:
    async with make_worker(echoes=False) as worker:
        dns = FakeDns(worker.address)
        async with gateway_with(dns) as gateway:
            await gateway.until_ready(1)
            call = gateway.stream(text("x"))
            received = await worker.request()
            dns.addresses = ()
            await gateway.until_ready(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await gateway.collect(text("too late"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            dns.addresses = (worker.address,)
            await gateway.until_ready(1)
            received.start()
            received.finish()
            await collect(call)
            assert worker.num_links == 1
            assert addresses(gateway) == {worker.address}


async def test_nothing_is_forgotten_while_a_name_cannot_be_resolved(
    make_worker: MakeWorker,
) -> None:
    async with make_worker() as worker:
        dns = FakeDns(worker.address)
        async with gateway_with(dns) as gateway:
            await gateway.until_ready(1)
            dns.addresses = OSError("no such name")
            asked = dns.num_asked
            await gateway.until(lambda: dns.num_asked > asked + 3)
            assert (await gateway.collect(text("still here"))).text == "still here"


async def test_a_gateway_that_starts_before_its_workers_have_a_name_waits_for_them(
    make_worker: MakeWorker,
) -> None:
    async with make_worker() as worker:
        dns = FakeDns()
        dns.addresses = OSError("no such name")
        async with gateway_with(dns) as gateway:
            await gateway.until(lambda: dns.num_asked > 2)
            assert not addresses(gateway)
            dns.addresses = (worker.address,)
            await gateway.until_ready(1)


async def test_names_and_addresses_may_be_mixed_and_a_worker_named_twice_is_one(
    make_worker: MakeWorker,
) -> None:
    async with make_worker() as one, make_worker() as two:
        dns = FakeDns(one.address, two.address)
        workers = (one.address, one.address, "dns:///worker:50052")
        async with gateway_with(dns, workers=workers) as gateway:
            await gateway.until_ready(2)
            dns.addresses = ()
            await gateway.until(lambda: addresses(gateway) == {one.address})
            assert one.num_links == 1


async def test_the_machines_resolver_finds_loopback() -> None:
    found = await SystemResolver().resolve(DnsName("localhost", 50052))
    assert found
    assert set(found) <= {"127.0.0.1:50052", "[::1]:50052"}


async def test_a_worker_found_by_name_proves_itself_by_that_name(
    tmp_path: Path, make_worker: MakeWorker
) -> None:
    authority = Authority(tmp_path)
    async with make_worker(tls=authority.server("worker.internal")) as worker:
        dns = FakeDns(worker.address)
        name = "dns:///worker.internal:50052"
        async with gateway_with(dns, workers=(name,), worker_tls_ca=str(authority.ca)) as gateway:
            await gateway.until_ready(1)
            assert (await gateway.collect(text("by name"))).text == "by name"
        other = "dns:///other.internal:50052"
        async with gateway_with(dns, workers=(other,), worker_tls_ca=str(authority.ca)) as gateway:
            await gateway.until(lambda: dns.num_asked > 20)
            assert gateway.running.router.num_ready == 0


async def test_names_become_the_names_that_certificates_are_checked_for() -> None:
    told: list[list[Endpoint]] = []
    discovery = Discovery(
        map(worker_place, ("127.0.0.1:1", "dns:///worker:50052")),
        lambda found: told.append(list(found)),
        resolver=FakeDns("10.0.0.2:50052", "10.0.0.1:50052"),
        interval_s=POLL_S,
    )
    assert told == [[Endpoint("127.0.0.1:1")]]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(discovery.run())
        async with asyncio.timeout(10):
            while len(told) < 2:  # noqa: ASYNC110 - it tells by a plain call
                await asyncio.sleep(POLL_S)
        running.cancel()
    assert told[1][1:] == [
        Endpoint("10.0.0.1:50052", "worker"),
        Endpoint("10.0.0.2:50052", "worker"),
    ]


@pytest.mark.parametrize(
    "value",
    [
        *("dns:worker:50052", "dns:///worker", "dns:///:50052", "dns:///a/b:1", "dns:///worker:0"),
        # Nobody could resolve these, nor any other name beside them.
        *("dns:///a..b:50052", f"dns:///{'x' * 64}.test:50052"),
    ],
)
def test_a_malformed_name_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="dns:///name:port|port must be"):
        GatewayConfig(workers=(value,))
