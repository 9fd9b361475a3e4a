"""Traces are off unless asked for; they arrive; and a dead collector is not waited for."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from shared.errors import SettingsError
from shared.tracing import checked_traceparent, open_tracer

PROGRAM = """
import os, sys, time
sys.modules.update({name: None for name in os.environ.get("HIDDEN", "").split()})
from shared.tracing import open_tracer
tracer = open_tracer("tandem-test", os.environ)
if tracer is not None:
    now = time.monotonic()
    tracer.start("work", parent="", started_at=now).end(now, {"answer": 42})
    tracer.close()
loaded = "opentelemetry.sdk.trace" in sys.modules
print(f"tracer {tracer is not None}, loaded {loaded}")
"""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "tandem"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    ],
)
async def test_traces_are_off_and_nothing_is_imported_unless_asked_for(
    environment: dict[str, str],
) -> None:
    assert open_tracer("tandem-test", environment) is None
    assert await output_of(environment) == "tracer False, loaded False"


async def test_without_the_extra_a_service_goes_on_without_traces() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "HIDDEN": "opentelemetry"}
    assert (await output_of(environment)).endswith("tracer False, loaded False")


async def test_spans_arrive_where_the_variables_say() -> None:
    async with collector() as (port, requests):
        endpoint = f"http://127.0.0.1:{port}"
        shown = await output_of({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        head, body = await asyncio.wait_for(requests.get(), 10)
    assert shown.endswith("tracer True, loaded True")
    assert head.startswith("POST /v1/traces ")
    # Strings stand in a protobuf message as they are.
    assert b"tandem-test" in body and b"work" in body and b"answer" in body


async def test_the_services_name_can_be_another() -> None:
    async with collector() as (port, requests):
        names = {"OTEL_SERVICE_NAME": "my-gateway"}
        await output_of({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", **names})
        _, body = await asyncio.wait_for(requests.get(), 10)
    assert b"my-gateway" in body and b"tandem-test" not in body


async def test_a_collector_that_never_answers_does_not_hold_up_the_end() -> None:
    async with collector(answers=False) as (port, requests):
        began = time.monotonic()
        await output_of({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
        assert time.monotonic() - began < 9
        assert not requests.empty()


def test_an_exporter_that_is_not_there_is_told_at_the_start() -> None:
    with pytest.raises(SettingsError, match="no exporter zipkin is installed"):
        open_tracer("tandem-test", {"OTEL_TRACES_EXPORTER": "zipkin"})


def test_a_traceparent_has_one_shape() -> None:
    good = f"00-{'a1' * 16}-{'b2' * 8}-01"
    assert checked_traceparent(good) == good
    for bad in ("", good + "-x", good.upper(), good[:-1], f" {good}", good + "\n"):
        assert checked_traceparent(bad) == "", bad


async def output_of(environment: Mapping[str, str]) -> str:
    """The last line of the program in that environment."""
    inherited = {name: value for name, value in os.environ.items() if "OTEL" not in name}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM),
        env={**inherited, **environment},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    return out.decode().strip().splitlines()[-1]


@asynccontextmanager
async def collector(
    *, answers: bool = True
) -> AsyncIterator[tuple[int, "asyncio.Queue[tuple[str, bytes]]"]]:
    """An HTTP server that keeps what is posted to it: the request line and the body."""
    requests: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await reader.readexactly(int(fields["content-length"]))
        requests.put_nowait((head.splitlines()[0], body))
        if answers:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        else:
            await gone.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        gone.set()
        server.close()
