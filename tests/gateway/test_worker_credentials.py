"""The hop to the workers: TLS, a client's certificate, and the token that workers ask for."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.config import GatewayConfig
from gateway.server import running_gateway
from shared.errors import SettingsError
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.certificates import Authority
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker, StartGateway


async def test_a_worker_behind_mutual_tls_serves(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("gateway.test", to="gateway")
    tls = authority.server("worker.internal", client_ca=authority.ca)
    async with (
        make_worker(tls=tls) as worker,
        start_gateway(
            worker,
            worker_tls_ca=str(authority.ca),
            worker_tls_cert=str(cert),
            worker_tls_key=str(key),
            worker_tls_server_name="worker.internal",
        ) as gateway,
    ):
        assert (await gateway.collect(text("one two"))).text == "one two"


@pytest.mark.parametrize("fault", ["in the clear", "other authority", "other name", "no client"])
async def test_a_worker_that_is_not_to_be_trusted_or_does_not_trust_us_is_not_used(
    tmp_path: Path, make_worker: MakeWorker, fault: str
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    name = "worker.internal" if fault == "other name" else "127.0.0.1"
    client_ca = authority.ca if fault == "no client" else None
    ca = {"in the clear": "", "other authority": str(other.ca)}.get(fault, str(authority.ca))
    tls = authority.server(name, client_ca=client_ca)
    with structlog.testing.capture_logs() as logs:
        async with make_worker(tls=tls) as worker:
            config = GatewayConfig(
                listen="127.0.0.1:0", workers=(worker.address,), worker_tls_ca=ca, drain_grace_s=0
            )
            async with running_gateway(config) as running, GatewayUnderTest(running) as gateway:
                await gateway.until(lambda: bool(logs))
                assert running.router.num_ready == 0
                assert worker.num_links == 0
    assert logs[0]["event"] == "worker not connected"
    assert logs[0]["worker"] == worker.address


async def test_new_files_are_used_when_the_worker_is_back_with_another_authority(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    authority = Authority(tmp_path)
    ca = str(authority.ca)
    async with (
        make_worker(tls=authority.server()) as worker,
        start_gateway(worker, worker_tls_ca=ca) as gateway,
    ):
        await worker.crash()
        # Both sides' files are replaced in place, the gateway's last.
        (tmp_path / "next").mkdir()
        successor = Authority(tmp_path / "next")
        worker.tls = successor.server()
        await worker.start()
        await gateway.until_ready(0)
        authority.become(successor)
        await gateway.until_ready(1)
        assert (await gateway.collect(text("one two"))).text == "one two"


async def test_a_worker_that_asks_for_a_token_gets_it_with_every_call(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    async with (
        make_worker(client_of={"secret": "gateway-1"}.get) as worker,
        start_gateway(worker, worker_token_file=str(path)) as gateway,
    ):
        assert (await gateway.collect(text("one two"))).text == "one two"
        assert await worker_calls(gateway) == [True, 7]
        assert worker.num_refusals == 0


async def worker_calls(gateway: GatewayUnderTest) -> list[object]:
    """Those that are passed on to the worker apart from the stream."""
    load = await gateway.stub.GetLoad(pb.GetLoadRequest())
    flushed = await gateway.stub.FlushCache(pb.FlushCacheRequest())
    return [load.workers[0].ready, flushed.pages_freed]


async def test_a_token_that_changes_on_both_sides_is_used_without_a_restart(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    path = tmp_path / "token"
    path.write_text("former")
    known = {"former": "gateway-1"}
    async with (
        make_worker(client_of=known.get, step_s=0.005) as worker,
        start_gateway(worker, worker_token_file=str(path)) as gateway,
    ):
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(gateway.collect(text("one two three four five six")))
            await worker.request()
            del known["former"]
            known["next"] = "gateway-1"
            path.write_text("next")
            assert await worker_calls(gateway) == [True, 7]
        # What ran had been let in.
        assert call.result().text == "one two three four five six"
        await worker.crash()
        await gateway.until_ready(0)
        await worker.start()
        await gateway.until_ready(1)
        assert worker.num_refusals == 0


async def test_a_worker_that_does_not_know_the_token_is_not_used_until_it_does(
    tmp_path: Path, make_worker: MakeWorker
) -> None:
    path = tmp_path / "token"
    path.write_text("secret-0")
    known = {"secret-1": "gateway-1"}
    with structlog.testing.capture_logs() as logs:
        async with make_worker(client_of=known.get) as worker:
            config = GatewayConfig(
                listen="127.0.0.1:0",
                workers=(worker.address,),
                worker_token_file=str(path),
                drain_grace_s=0,
            )
            async with running_gateway(config) as running, GatewayUnderTest(running) as gateway:
                await worker.until(lambda: worker.num_refusals > 1)
                assert running.router.num_ready == 0
                path.write_text("secret-1")
                await gateway.until_ready(1)
    assert "a valid bearer token is required" in repr(logs)
    assert "secret-" not in repr(logs)


@pytest.mark.parametrize(
    "settings",
    [
        {"worker_tls_ca": "missing.pem"},
        {"worker_tls_cert": "missing.pem", "worker_tls_key": "missing.pem"},
        {"worker_tls_server_name": "worker.internal"},
        {"worker_token_file": "missing.token"},
        {"tokens_file": "missing.tokens"},
        {"tls_cert": "missing.pem", "tls_key": "missing.pem"},
        {"tls_client_ca": "missing.pem"},
    ],
)
async def test_a_setting_that_cannot_be_used_is_told_before_anything_serves(
    settings: dict[str, Any],
) -> None:
    config = GatewayConfig(listen="127.0.0.1:0", workers=("127.0.0.1:1",), **settings)
    with pytest.raises(SettingsError):
        async with running_gateway(config):
            raise AssertionError("it serves")
