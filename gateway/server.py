"""The composition root: builds every part of the gateway, and takes them down in order."""

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from prometheus_client import CollectorRegistry

from gateway.auth import MetadataIdentityInterceptor
from gateway.backoff import Breaker
from gateway.config import GatewayConfig
from gateway.encoding import PromptEncoder
from gateway.generation import Generator
from gateway.live_requests import LiveRequests
from gateway.router import Router
from gateway.service import InferenceService, ServiceLimits
from gateway.tokenizer import TemplateLimits
from gateway.tokenizer_store import TokenizerStore
from gateway.worker_dialer import WorkerDialer
from gateway.worker_link import LinkEvents, LinkTimes, WorkerLink
from shared.auth import BearerTokenInterceptor
from shared.errors import SettingsError
from shared.grpc_options import channel_options, server_options
from shared.hang_up import hang_ups
from shared.health import Readiness
from shared.interceptors import server_interceptors
from shared.metrics import GatewayMetrics, metrics_exporter
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.reflection import enable_reflection
from shared.shutdown import shutdown_event
from shared.tasks import TaskSet
from shared.tls import client_tls, server_credentials, server_tls
from shared.tokens import TokenStore

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
    tokens: TokenStore


async def serve(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises AddressInUseError, SettingsError."""
    with shutdown_event() as stop:
        async with running_gateway(config) as gateway:
            # What start-up made lives for ever; collections need not look at it again.
            gc.collect()
            gc.freeze()
            _log.info("serving", listen=config.listen, port=gateway.port, workers=config.workers)
            with hang_ups(gateway.tokens.look_again) if config.tokens_file else nullcontext():
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
    tokens = _tokens(config)
    with (
        ThreadPoolExecutor(config.tokenizer_threads, "tokenizer") as executor,
        metrics_exporter(registry, config.metrics_host, config.metrics_port),
    ):
        events = LinkEvents(changed.set, metrics.worker_losses.inc, metrics.hop_lag.observe)
        router = _router(config, executor, events)
        metrics.workers_ready.set_function(lambda: router.num_ready)
        service = _service(config, router, executor, live_requests, metrics)
        server = _server(config, tokens)
        pb_grpc.add_InferenceServiceServicer_to_server(service, server)
        enable_reflection(server, (SERVICE_NAME, "grpc.health.v1.Health"))
        await readiness.attach(server)
        port = _bind(server, config)
        await server.start()
        async with TaskSet() as tasks:
            for link in router.links:
                tasks.start(link.run(), name=f"link {link.address}")
            tasks.start(_report_readiness(router, readiness, changed), name="readiness")
            tasks.start(tokens.follow(), name="tokens")
            try:
                yield RunningGateway(port, readiness, router, live_requests, tokens)
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
    dialer = _dialer(config, times)
    return Router(
        [
            WorkerLink(
                address,
                tokenizers=tokenizers,
                dialer=dialer,
                times=times,
                breaker=Breaker(config.breaker_threshold, config.breaker_cool_down_s),
                events=events,
            )
            for address in config.workers
        ]
    )


def _dialer(config: GatewayConfig, times: LinkTimes) -> WorkerDialer:
    options = channel_options(
        max_message_bytes=config.max_message_bytes,
        own_connection=True,
        max_reconnect_backoff_ms=round(1e3 * times.max_retry_s),
    )
    tls = client_tls(
        config.worker_tls_ca,
        config.worker_tls_cert,
        config.worker_tls_key,
        config.worker_tls_server_name,
        prefix="--worker-tls",
    )
    token_file = Path(config.worker_token_file) if config.worker_token_file else None
    return WorkerDialer(options, tls=tls, token_file=token_file)


def _tokens(config: GatewayConfig) -> TokenStore:
    listed = [token.get_secret_value() for token in config.tokens]
    return TokenStore(listed, Path(config.tokens_file) if config.tokens_file else None)


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


def _server(config: GatewayConfig, tokens: TokenStore) -> grpc.aio.Server:
    interceptors = server_interceptors()
    if tokens.is_required:
        interceptors.append(BearerTokenInterceptor(tokens.client_of))
    elif config.client_metadata_key:
        interceptors.append(MetadataIdentityInterceptor(config.client_metadata_key))
    return grpc.aio.server(
        interceptors=interceptors,
        options=server_options(max_message_bytes=config.max_message_bytes),
    )


def _bind(server: grpc.aio.Server, config: GatewayConfig) -> int:
    """The port. Raises AddressInUseError, and SettingsError when a certificate is unfit."""
    tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
    credentials = None if tls is None else server_credentials(tls, _complain)
    address = config.listen
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise AddressInUseError(f"cannot listen on {address}") from error
    if port == 0:
        raise AddressInUseError(f"cannot listen on {address}")
    return port


def _complain(error: SettingsError) -> None:
    _log.error("certificate not read; the former one stays", reason=str(error))
