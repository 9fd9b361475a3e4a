"""The gateway's span of each generation, and what the worker gets of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.trace import StatusCode

from gateway.config import GatewayConfig
from gateway.server import running_gateway
from shared.errors import Code
from tests.answers import collect
from tests.gateway.client import GatewayUnderTest, text
from tests.gateway.conftest import MakeWorker
from tests.gateway.fake_worker import FakeWorker
from tests.traces import Spans, id_of, parent_of, seconds, trace_of, traceparent_of

STREAM = "tandem.v1.InferenceService/GenerateStream"
UNARY = "tandem.v1.InferenceService/Generate"
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@asynccontextmanager
async def traced_gateway(
    worker: FakeWorker, spans: Spans, **settings: Any
) -> AsyncIterator[GatewayUnderTest]:
    config = GatewayConfig(
        listen="127.0.0.1:0", workers=(worker.address,), **{"drain_grace_s": 0.5, **settings}
    )
    async with (
        running_gateway(config, tracer=spans.tracer) as running,
        GatewayUnderTest(running) as gateway,
    ):
        await gateway.until_ready(1)
        yield gateway
        await gateway.until_idle()


@pytest.mark.parametrize("name", [STREAM, UNARY])
async def test_a_generation_is_a_span_of_the_callers_trace_and_the_workers_is_one_of_it(
    make_worker: MakeWorker, name: str
) -> None:
    spans = Spans()
    metadata = (("traceparent", CALLER),)
    async with make_worker() as worker, traced_gateway(worker, spans) as gateway:
        request = text("one two", request_id="r-1")
        if name == STREAM:
            await collect(gateway.stub.GenerateStream(request, metadata=metadata))
        else:
            await gateway.stub.Generate(request, metadata=metadata)
    span = spans.named(name)
    assert (trace_of(span), parent_of(span)) == ("a" * 32, "b" * 16)
    assert worker.requests[0].submit.traceparent == traceparent_of(span)
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes is not None
    num_tokens = span.attributes["gen_ai.usage.output_tokens"]
    assert isinstance(num_tokens, int) and num_tokens > 1
    assert span.attributes["tandem.request_id"] == "r-1"
    assert span.attributes["tandem.outcome"] == "EOS"
    assert span.attributes["tandem.queue_ms"] == 1.5
    # However many tokens there were.
    [event] = span.events
    assert event.name == "first token"
    assert span.start_time is not None and span.end_time is not None
    assert span.start_time < event.timestamp <= span.end_time
    assert 0 < seconds(span) < 30


async def test_without_a_callers_trace_one_begins_here(make_worker: MakeWorker) -> None:
    spans = Spans()
    async with make_worker() as worker, traced_gateway(worker, spans) as gateway:
        await gateway.collect(text("one"))
        await gateway.collect(text("two"))
    first, second = spans.ended
    assert parent_of(first) == parent_of(second) == ""
    assert trace_of(first) != trace_of(second)
    assert id_of(first) in worker.requests[0].submit.traceparent


async def test_a_caller_that_is_not_sampled_is_not_recorded_and_passed_on(
    make_worker: MakeWorker,
) -> None:
    spans = Spans()
    metadata = (("traceparent", CALLER[:-2] + "00"),)
    async with make_worker() as worker, traced_gateway(worker, spans) as gateway:
        await gateway.stub.Generate(text("one"), metadata=metadata)
    assert not spans.ended
    passed = worker.requests[0].submit.traceparent
    assert passed.split("-")[1] == "a" * 32 and passed.endswith("-00")


@pytest.mark.parametrize(
    ("fault", "outcome", "is_error"),
    [("engine", "INTERNAL", True), ("caller", "INVALID_ARGUMENT", False)],
)
async def test_a_fault_of_ours_is_an_error_and_a_callers_is_not(
    make_worker: MakeWorker, fault: str, outcome: str, is_error: bool
) -> None:
    spans = Spans()
    async with make_worker(echoes=False) as worker, traced_gateway(worker, spans) as gateway:
        call = gateway.stub.Generate(text("x", max_tokens=None if fault == "engine" else 0))
        if fault == "engine":
            (await worker.request()).fail(Code.INTERNAL, "the step failed")
        assert (await call.code()).name == outcome
    span = spans.named(UNARY)
    assert span.attributes is not None and span.attributes["tandem.outcome"] == outcome
    assert span.attributes.get("error.type") == (outcome if is_error else None)
    assert span.status.is_ok is not is_error


async def test_a_cancelled_call_ends_its_span(make_worker: MakeWorker) -> None:
    spans = Spans()
    async with make_worker(echoes=False) as worker, traced_gateway(worker, spans) as gateway:
        call = gateway.stub.Generate(text("x"))
        await worker.request()
        call.cancel()
        await gateway.until(lambda: len(spans.ended) == 1)
    attributes = spans.named(UNARY).attributes
    assert attributes is not None and attributes["tandem.outcome"] == "CANCELLED"


@pytest.mark.parametrize(
    ("settings", "metadata", "client"),
    [
        ({"client_metadata_key": "x-user"}, (("x-user", "alice"),), "alice"),
        ({"client_metadata_key": "x-user"}, (("x-user", "u" * 500),), "u" * 128),
        ({"client_metadata_key": "x-user"}, (), None),
        ({}, (("x-user", "alice"),), None),
        # A token says more than a key that anybody can send.
        (
            {"client_metadata_key": "x-user", "tokens": ("secret",)},
            (("x-user", "alice"), ("authorization", "Bearer secret")),
            "sha256-2bb80d53",
        ),
    ],
)
async def test_a_span_names_the_client_where_it_has_a_name(
    make_worker: MakeWorker, settings: dict[str, Any], metadata: Any, client: str | None
) -> None:
    spans = Spans()
    async with make_worker() as worker, traced_gateway(worker, spans, **settings) as gateway:
        code = await gateway.stub.Generate(text("x"), metadata=metadata).code()
        assert code is grpc.StatusCode.OK
    attributes = spans.named(UNARY).attributes
    assert attributes is not None and attributes.get("tandem.client") == client
