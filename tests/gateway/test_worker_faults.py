"""What counts as a fault of a worker, and what follows from several."""

import time
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gateway.backoff import Backoff, Breaker
from gateway.router import Router
from gateway.routing import Chooser
from gateway.service import InferenceService
from shared.errors import Code, UnavailableError
from shared.metrics import RoutingMetrics
from shared.pb.tandem.v1 import inference_pb2 as public_pb
from tests.gateway.conftest import StartQuiet

Status = grpc.StatusCode


async def test_the_loss_of_a_worker_with_many_streams_is_one_fault(quiet: StartQuiet) -> None:
    async with quiet(breaker_threshold=2, breaker_cool_down_s=60) as pair:
        (link,) = pair.gateway.running.router.links
        for is_suspect in (False, True):
            calls = [(await pair.stream())[0] for _ in range(3)]
            await pair.worker.crash()
            assert [await call.code() for call in calls] == [Status.UNAVAILABLE] * 3
            await pair.gateway.until(lambda: not link.is_ready)
            assert link.is_suspect(time.monotonic()) is is_suspect
            await pair.worker.start()
            await pair.gateway.until_ready(1)


@pytest.mark.parametrize(
    ("code", "is_suspect"),
    [
        (Code.INVALID_ARGUMENT, False),
        (Code.RESOURCE_EXHAUSTED, False),
        (Code.DEADLINE_EXCEEDED, False),
        (Code.INTERNAL, True),
        (Code.UNAVAILABLE, True),
    ],
)
async def test_only_faults_of_its_own_make_a_worker_suspect(
    quiet: StartQuiet, code: Code, is_suspect: bool
) -> None:
    async with quiet(breaker_threshold=1, breaker_cool_down_s=60) as pair:
        call, request = await pair.stream()
        request.reject(code, "no")
        assert await call.code() != Status.OK
        await pair.gateway.until_idle()
        (link,) = pair.gateway.running.router.links
        assert link.is_suspect(time.monotonic()) is is_suspect


class Leaving:
    """A link whose worker is gone once it is asked for something."""

    model = object()
    is_ready = True

    async def flush_cache(self) -> int:
        self.is_ready = False
        return 0


async def test_a_flush_that_finds_the_last_worker_gone_does_not_look_like_an_empty_cache() -> None:
    link: Any = Leaving()
    unused: Any = None
    router = Router(lambda: [link], Chooser(), RoutingMetrics(CollectorRegistry()))
    service = InferenceService(unused, router, unused, unused, unused, limits=unused)
    with pytest.raises(UnavailableError, match="no worker is ready"):
        await service.FlushCache(public_pb.FlushCacheRequest(), unused)


def test_a_backoff_begins_short_doubles_and_stops_growing() -> None:
    backoff = Backoff(0.1, 1.0)
    waits = [backoff.next_s() for _ in range(8)]
    assert 0.07 < waits[0] < 0.13
    assert 0.15 < waits[1] < 0.25
    assert 0.75 <= waits[-1] <= 1.25
    backoff.reset()
    assert backoff.next_s() < 0.13


def test_a_breaker_opens_after_faults_in_a_row_and_closes_with_time() -> None:
    breaker = Breaker(threshold=2, cool_down_s=5)
    assert not breaker.record_fault(now=0)
    breaker.record_success()
    assert not breaker.record_fault(now=1)
    assert not breaker.is_open(now=1)
    assert breaker.record_fault(now=2)
    assert breaker.is_open(now=6.9)
    assert not breaker.is_open(now=7)


def test_a_breaker_tells_of_each_opening_once() -> None:
    breaker = Breaker(threshold=1, cool_down_s=5)
    assert [breaker.record_fault(now) for now in (0, 4, 8.9, 14)] == [True, False, False, True]
    never = Breaker(threshold=1, cool_down_s=0)
    assert not never.record_fault(now=0)
