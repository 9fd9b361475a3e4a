"""The composition root: builds every part of the gateway, and takes them down in order."""

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import structlog
from prometheus_client import CollectorRegistry

from gateway.auth import BearerTokenInterceptor
from gateway.backoff import Breaker
from gateway.config import GatewayConfig
from gateway.encoding import PromptEncoder
from gateway.generation import Generator
from gateway.live_requests import LiveRequests
from gateway.router import Router
from gateway.service import InferenceService, ServiceLimits
from gateway.tokenizer import TemplateLimits
from gateway.tokenizer_store import TokenizerStore
from gateway.worker_link import LinkEvents, LinkTimes, WorkerLink
from shared.grpc_options import channel_options, server_options
from shared.health import Readiness
from shared.interceptors import server_interceptors
from shared.metrics import GatewayMetrics, metrics_exporter
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.reflection import enable_reflection
from shared.shutdown import shutdown_event
from shared.tasks import TaskSet

_log = structlog.get_logger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
# For the last statuses to leave, once no request lives any more.
_CLOSE_GRACE_S = 1.0


class AddressInUseError(OSError):
    """The address to listen on cannot be had."""


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves."""

    # With the port that was bound, where 0 was asked for.
    port: int
    readiness: Readiness
    router: Router
    live_requests: LiveRequests


async def serve(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises AddressInUseError."""
    with shutdown_event() as stop:
        async with running_gateway(config) as gateway:
            # What start-up made lives for ever; collections need not look at it again.
            gc.collect()
            gc.freeze()
            _log.info("serving", listen=config.listen, port=gateway.port, workers=config.workers)
            await stop.wait()
            _log.info("draining", live_requests=len(gateway.live_requests))
    _log.info("stopped")


@asynccontextmanager
async def running_gateway(config: GatewayConfig) -> AsyncIterator[RunningGateway]:
    """A gateway that serves inside the block and drains when the block is left."""
    changed = asyncio.Event()
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    live_requests = LiveRequests(config.max_live_requests)
    metrics.live_requests.set_function(live_requests.__len__)
    readiness = Readiness(SERVICE_NAME)
    with (
        ThreadPoolExecutor(config.tokenizer_threads, "tokenizer") as executor,
        metrics_exporter(registry, config.metrics_host, config.metrics_port),
    ):
        events = LinkEvents(changed.set, metrics.worker_losses.inc, metrics.hop_lag.observe)
        router = _router(config, executor, events)
        metrics.workers_ready.set_function(lambda: router.num_ready)
        service = _service(config, router, executor, live_requests, metrics)
        server = _server(config)
        pb_grpc.add_InferenceServiceServicer_to_server(service, server)
        enable_reflection(server, (SERVICE_NAME, "grpc.health.v1.Health"))
        await readiness.attach(server)
        port = _bind(server, config.listen)
        await server.start()
        async with TaskSet() as tasks:
            for link in router.links:
                tasks.start(link.run(), name=f"link {link.address}")
            tasks.start(_report_readiness(router, readiness, changed), name="readiness")
            try:
                yield RunningGateway(port, readiness, router, live_requests)
            finally:
                await readiness.shut_down()
                await live_requests.drain(config.drain_grace_s)
                await server.stop(_CLOSE_GRACE_S)


async def _report_readiness(router: Router, readiness: Readiness, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        if router.num_ready:
            await readiness.set_serving()
        else:
            await readiness.set_not_serving()


def _router(config: GatewayConfig, executor: ThreadPoolExecutor, events: LinkEvents) -> Router:
    limits = TemplateLimits(max_chars=config.max_prompt_bytes, max_seconds=config.template_limit_s)
    tokenizers = TokenizerStore(executor, limits)
    times = LinkTimes(
        ping_interval_s=config.worker_silence_limit_s / 5,
        silence_limit_s=config.worker_silence_limit_s,
    )
    options = channel_options(
        max_message_bytes=config.max_message_bytes,
        own_connection=True,
        max_reconnect_backoff_ms=round(1e3 * times.max_retry_s),
    )
    return Router(
        [
            WorkerLink(
                address,
                tokenizers=tokenizers,
                options=options,
                times=times,
                breaker=Breaker(config.breaker_threshold, config.breaker_cool_down_s),
                events=events,
            )
            for address in config.workers
        ]
    )


def _service(
    config: GatewayConfig,
    router: Router,
    executor: ThreadPoolExecutor,
    live_requests: LiveRequests,
    metrics: GatewayMetrics,
) -> InferenceService:
    encoder = PromptEncoder(
        executor,
        max_prompt_bytes=config.max_prompt_bytes,
        max_pending=config.max_live_requests,
    )
    generator = Generator(router, encoder, live_requests, max_delta_tokens=config.max_delta_tokens)
    limits = ServiceLimits(
        max_message_bytes=config.max_message_bytes,
        default_timeout_s=config.default_timeout_s,
        slow_reader_limit_s=config.slow_reader_limit_s,
    )
    return InferenceService(generator, router, encoder, live_requests, metrics, limits=limits)


def _server(config: GatewayConfig) -> grpc.aio.Server:
    interceptors = server_interceptors()
    if config.tokens:
        tokens = [token.get_secret_value() for token in config.tokens]
        interceptors.append(BearerTokenInterceptor(tokens))
    return grpc.aio.server(
        interceptors=interceptors,
        options=server_options(max_message_bytes=config.max_message_bytes),
    )


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUseError(f"cannot listen on {address}") from error
    if port == 0:
        raise AddressInUseError(f"cannot listen on {address}")
    return port
