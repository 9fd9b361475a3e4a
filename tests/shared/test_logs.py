"""What a process writes to stderr."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import structlog
from shared.logs import LogFormat, configure_logging, request_logging

configure_logging("tester", LogFormat(sys.argv[1]), level="info")
log = structlog.get_logger("ours")
log.debug("too quiet")
with request_logging("r-1"):
    log.info("hello", count=3)
    logging.getLogger("theirs").warning("from the %s library", "standard")
try:
    prompt = "a client's secret"
    1 / 0
except ZeroDivisionError:
    log.exception("went wrong")
"""

# A server that is sent metadata which is no UTF-8.
SERVER = """
import asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shared.auth import BearerTokenInterceptor
from shared.grpc_options import server_options
from shared.grpc_server import new_server
from shared.health import Readiness
from shared.logs import LogFormat, configure_logging
from tests.faults.frames import PREFACE, SETTINGS, headers

async def main():
    server = new_server([BearerTokenInterceptor(lambda _: None, lambda: None)], server_options())
    await Readiness().attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    token = {b"authorization": b"Bearer s3cret" + bytes([255])}
    writer.write(PREFACE + SETTINGS + headers(b"/grpc.health.v1.Health/None", more=token))
    heard = b""
    while b"grpc-message" not in heard:
        heard += await reader.read(4096)
    writer.close()
    await server.stop(None)

configure_logging("tester", LogFormat.JSON, level="debug")
asyncio.run(main())
"""


def lines_of(log_format: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_json_lines_carry_service_request_id_and_fields() -> None:
    first, second, third = (json.loads(line) for line in lines_of("json"))
    assert (first["event"], first["count"], first["level"]) == ("hello", 3, "info")
    assert first["service"] == second["service"] == third["service"] == "tester"
    assert first["request_id"] == second["request_id"] == "r-1"
    assert second["event"] == "from the standard library"
    assert "request_id" not in third
    assert "ZeroDivisionError" in third["exception"]


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_traceback_shows_no_values(log_format: str) -> None:
    log = "\n".join(lines_of(log_format))
    assert "ZeroDivisionError" in log
    assert "secret" not in log


def test_metadata_that_is_no_text_is_not_shown() -> None:
    ran = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    assert "s3cret" not in ran.stderr + ran.stdout
    assert '"tester"' in ran.stderr


def test_away_from_a_terminal_auto_is_json() -> None:
    assert json.loads(lines_of("auto")[0])["event"] == "hello"


def test_human_lines_are_no_json_and_have_no_colours_away_from_a_terminal() -> None:
    first = lines_of("human")[0]
    assert "hello" in first and "count=3" in first
    assert "\x1b" not in first
