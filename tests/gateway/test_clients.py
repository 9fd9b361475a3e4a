"""Clients with names: tokens that change under a live stream, counts, and what nobody is told."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from shared.auth import bearer_metadata
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.tokens import hash_line
from tests.answers import collect
from tests.faults.frames import PREFACE, SETTINGS, headers, only_message
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet
from tests.gateway.test_metrics import read
from tests.ports import free_port

Status = grpc.StatusCode
GENERATE = b"/tandem.v1.InferenceService/Generate"


async def code_with(gateway: GatewayUnderTest, token: str) -> grpc.StatusCode:
    call = gateway.stub.Generate(text("x"), metadata=bearer_metadata(token))
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_token_that_is_taken_away_ends_no_live_stream_and_starts_none(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    path = tmp_path / "tokens"
    path.write_text(hash_line("alice", "former"))
    async with (
        make_worker(echoes=False) as worker,
        start_gateway(worker, tokens_file=str(path)) as gateway,
        asyncio.TaskGroup() as tasks,
    ):
        stream = gateway.stub.GenerateStream(text("x"), metadata=bearer_metadata("former"))
        answer = tasks.create_task(collect(stream))
        received = await worker.request()
        received.start()
        path.write_text(hash_line("alice", "next"))
        gateway.running.tokens.look_again()
        await gateway.until(lambda: gateway.running.tokens.client_of("next") == "alice")
        assert await code_with(gateway, "former") == Status.UNAUTHENTICATED
        received.send_tokens([10, 11])
        received.finish()
        assert (await answer).token_ids == [10, 11]
        with_next = tasks.create_task(code_with(gateway, "next"))
        (await worker.request(1)).finish()
        assert await with_next == Status.OK


async def test_a_worker_is_told_whose_a_request_is(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    path = tmp_path / "tokens"
    path.write_text("alice:hers\n")
    async with make_worker() as worker:
        async with start_gateway(worker, tokens_file=str(path)) as gateway:
            metadata = bearer_metadata("hers")
            await gateway.stub.Generate(text("x"), metadata=metadata)
            await gateway.stub.Generate(text("x", n=2), metadata=metadata)
        async with start_gateway(worker, client_metadata_key="x-client") as gateway:
            await gateway.stub.Generate(text("x"), metadata=(("x-client", "bob"),))
            await gateway.stub.Generate(text("x"))
        told = [request.submit.client for request in worker.requests]
        assert told == ["alice"] * 3 + ["bob", ""]


async def test_a_name_that_could_write_log_lines_of_its_own_is_no_name(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    async with (
        make_worker() as worker,
        start_gateway(worker, client_metadata_key="x-client") as gateway,
    ):
        _, writer = await asyncio.open_connection(*gateway.address.split(":"))
        name = {b"x-client": b"eve\n[error] forged"}
        writer.write(PREFACE + SETTINGS + headers(GENERATE, more=name) + only_message(text("x")))
        assert (await worker.request()).submit.client == ""
        writer.close()
        await gateway.until_idle()


async def test_clients_are_counted_by_the_names_of_their_tokens(
    tmp_path: Path, make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    path, port = tmp_path / "tokens", free_port()
    path.write_text("alice:hers\nbob:his\n")
    async with (
        make_worker() as worker,
        start_gateway(worker, tokens_file=str(path), metrics_port=port) as gateway,
    ):
        for token in ("hers", "his", "hers", "theirs"):
            await code_with(gateway, token)
        await gateway.until_idle()
        metrics = await asyncio.to_thread(read, port)
    name = 'tandem_client_requests_total{{client="{}",outcome="EOS"}}'
    assert (metrics[name.format("alice")], metrics[name.format("bob")]) == (2, 1)
    tokens = 'tandem_client_generation_tokens_total{{client="{}"}}'
    assert metrics[tokens.format("alice")] == 2 * metrics[tokens.format("bob")] > 0
    assert metrics["tandem_unauthenticated_calls_total"] == 1


async def test_names_that_anybody_can_make_up_are_not_counted(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    port = free_port()
    async with (
        make_worker() as worker,
        start_gateway(worker, client_metadata_key="x-user", metrics_port=port) as gateway,
    ):
        await gateway.stub.Generate(text("x"), metadata=(("x-user", "anybody"),))
        await gateway.until_idle()
        metrics = await asyncio.to_thread(read, port)
    assert "anybody" not in repr(metrics)


async def test_a_lost_workers_address_is_no_clients_business(quiet: StartQuiet) -> None:
    async with quiet() as pair:
        call = pair.gateway.stub.Generate(text("x"))
        await pair.worker.request()
        port = str(pair.worker.port)
        await pair.worker.crash()
        answers: list[Any] = [call, pair.gateway.stub.FlushCache(pb.FlushCacheRequest())]
        for answer in answers:
            assert await answer.code() == Status.UNAVAILABLE
            assert port not in await answer.details()


@pytest.mark.parametrize("value", ["x", "00-" + "0" * 200, "a" * 2000, "00-ab-cd-01"])
async def test_what_is_no_traceparent_goes_no_further(
    make_worker: MakeWorker, start_gateway: StartGateway, value: str
) -> None:
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await gateway.stub.Generate(text("x"), metadata=(("traceparent", value),))
        assert worker.requests[0].submit.traceparent == ""


async def test_a_traceparent_goes_on_to_the_worker_as_it_is(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    value = f"00-{'a' * 32}-{'b' * 16}-01"
    async with make_worker() as worker, start_gateway(worker) as gateway:
        await gateway.stub.Generate(text("x"), metadata=(("traceparent", value),))
        assert worker.requests[0].submit.traceparent == value
