"""What README.md and docs/client.md give to paste works as pasted, but for the address."""

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.settings_table import README
from tests.integration.pair import Pair

ADDRESS = "127.0.0.1:50051"
CLIENT_PAGE = README.parent / "docs/client.md"


def blocks(language: str, containing: str, document: Path = README) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)
    return [block for block in found if containing in block]


def shell_lines(tool: str) -> list[str]:
    lines = [line for block in blocks("sh", f"{tool} ") for line in block.splitlines()]
    return [line for line in lines if line.startswith(tool)]


def at(pair: Pair, text: str) -> str:
    return text.replace(ADDRESS, pair.address)


async def run(*command: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.parametrize(
    ("document", "containing"),
    [(README, "import Client"), (CLIENT_PAGE, "AsyncClient"), (CLIENT_PAGE, "GenerateStream")],
)
async def test_every_python_example_prints_the_answer(
    echo_pair: Pair, document: Path, containing: str
) -> None:
    (program,) = blocks("python", containing, document)
    code, out = await run(sys.executable, "-W", "error", "-c", at(echo_pair, program))
    assert code == 0, out
    # The echo of the rendered chat, up to the end of its first turn.
    assert out.startswith("system\n")


async def test_the_example_of_an_encrypted_connection_makes_a_client() -> None:
    (program,) = blocks("python", "Tls()", CLIENT_PAGE)
    code, out = await run(sys.executable, "-W", "error", "-c", program)
    assert code == 0, out


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed")
@pytest.mark.parametrize("line", shell_lines("grpcurl"))
async def test_every_grpcurl_line_succeeds(echo_pair: Pair, line: str) -> None:
    code, out = await run("bash", "-c", at(echo_pair, line))
    assert code == 0, out
    assert out


@pytest.mark.skipif(shutil.which("ghz") is None, reason="ghz is not installed")
@pytest.mark.parametrize("line", shell_lines("ghz"))
async def test_every_ghz_line_gets_nothing_but_ok(echo_pair: Pair, line: str) -> None:
    code, out = await run("bash", "-c", at(echo_pair, line))
    assert code == 0, out
    assert re.search(r"\[OK\]\s+64 responses", out), out
    assert "Error distribution" not in out
