"""The worker's spans: queue, prefill and decode of each request, made at its end."""

import pytest

from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from tests.traces import Spans, id_of, parent_of, seconds, trace_of
from tests.worker.front.conftest import MakeWorker

GATEWAY = f"00-{'a' * 32}-{'b' * 16}-01"


async def test_a_request_is_a_span_with_its_phases_in_the_gateways_trace(
    make_worker: MakeWorker,
) -> None:
    spans = Spans()
    async with make_worker(tracer=spans.tracer, echo_step_ms=5) as worker:
        link = worker.link()
        await link.submit(1, [10, 11, 12], traceparent=GATEWAY)
        await link.outcome(1)
        await worker.assert_clean()
    whole = spans.named("generate")
    assert (trace_of(whole), parent_of(whole)) == ("a" * 32, "b" * 16)
    phases = [spans.named(name) for name in ("queue", "prefill", "decode")]
    assert all(parent_of(phase) == id_of(whole) for phase in phases)
    starts = [span.start_time or 0 for span in (whole, *phases)]
    assert starts[0] == pytest.approx(starts[1], abs=1e6)
    assert starts[1:] == sorted(starts[1:])
    assert [seconds(phase) > 0.004 for phase in phases[1:]] == [True, True]
    assert seconds(whole) + 0.001 >= sum(map(seconds, phases))
    assert whole.attributes is not None
    assert whole.attributes["tandem.request_id"] == "request-1"
    assert whole.attributes["tandem.outcome"] == "EOS"
    # Three echoed and the one that ended it.
    assert whole.attributes["tandem.completion_tokens"] == 4
    assert len(spans.ended) == 4


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'a' * 32}-{'b' * 16}-01-more"])
async def test_a_request_without_a_trace_begins_one(
    make_worker: MakeWorker, traceparent: str
) -> None:
    spans = Spans()
    async with make_worker(tracer=spans.tracer) as worker:
        link = worker.link()
        await link.submit(1, [10], traceparent=traceparent)
        await link.outcome(1)
        await worker.assert_clean()
    assert parent_of(spans.named("generate")) == ""


async def test_a_request_that_nobody_waits_for_ends_its_span(make_worker: MakeWorker) -> None:
    spans = Spans()
    async with make_worker(tracer=spans.tracer, echo_step_ms=20) as worker:
        link = worker.link()
        await link.submit(1, range(10, 40))
        await link.until(lambda: link[1].started == 1)
        await link.abort(1, reply=False)
        await worker.wait_load(lambda load: load.running == 0)
        await worker.assert_clean()
    attributes = spans.named("generate").attributes
    assert attributes is not None and attributes["tandem.outcome"] == "ABANDONED"


async def test_a_refused_request_has_no_span_and_a_failed_one_an_error(
    make_worker: MakeWorker,
) -> None:
    spans = Spans()
    async with make_worker(tracer=spans.tracer, echo_step_ms=20, drain_grace_s=0) as worker:
        link = worker.link()
        await link.submit(1, [])
        assert (await link.outcome(1)).failure
        await link.submit(2, range(10, 40))
        await link.until(lambda: link[2].started == 1)
        assert (await worker.stub.Drain(pb.DrainRequest())).live_requests == 1
        worker.stop.set()
        assert (await link.outcome(2)).failure
    span = spans.named("generate")
    assert span.attributes is not None
    assert span.attributes["tandem.request_id"] == "request-2"
    assert span.attributes["error.type"] == "UNAVAILABLE"
    assert not span.status.is_ok
