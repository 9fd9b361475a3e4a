"""`tandem model` and `tandem health`, and what the command line must not import."""

import asyncio
import json
import sys

import grpc
import pytest

from shared.errors import UnavailableError
from shared.health import Readiness
from tests.cli.fake_gateway import FakeGateway
from tests.cli.terminal import tandem


async def test_model_is_a_table_and_json(fake_gateway: FakeGateway) -> None:
    table = await tandem("model", "--address", fake_gateway.address)
    assert "tiny" in table.out
    assert "2, 7" in table.out
    shown = await tandem("model", "--json", "--address", fake_gateway.address)
    assert json.loads(shown.out)["eos_token_ids"] == [2, 7]


async def test_model_without_a_worker_exits_with_1(fake_gateway: FakeGateway) -> None:
    fake_gateway.error = UnavailableError("no worker is ready")
    run = await tandem("model", "--address", fake_gateway.address)
    assert run.code == 1
    assert "no worker is ready" in run.err


@pytest.mark.parametrize(
    "command", [("gateway.cli", "health", "--address"), ("gateway.cli.health",)]
)
async def test_health_follows_the_server(command: tuple[str, ...]) -> None:
    readiness = Readiness("tandem.v1.InferenceService")
    server = grpc.aio.server()
    await readiness.attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await probe(*command, f"127.0.0.1:{port}") == (1, "NOT_SERVING")
    await readiness.set_serving()
    assert await probe(*command, f"127.0.0.1:{port}") == (0, "SERVING")
    await server.stop(None)
    code, answer = await probe(*command, f"127.0.0.1:{port}")
    assert code == 1
    assert answer.startswith("UNREACHABLE")


async def probe(*command: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().strip()


async def test_the_command_line_imports_neither_torch_nor_the_worker() -> None:
    program = (
        "import sys, gateway.cli.main;"
        "bad = {'torch', 'transformers', 'worker'} & set(sys.modules);"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
