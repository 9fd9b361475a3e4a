"""The composition root: builds every part of the gateway, and takes them down in order."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog
from prometheus_client import CollectorRegistry

from gateway.auth import MetadataIdentityInterceptor
from gateway.backoff import Breaker
from gateway.config import GatewayConfig
from gateway.discovery import Discovery, Endpoint, Resolver, SystemResolver, worker_place
from gateway.encoding import PromptEncoder
from gateway.generation import Generator
from gateway.live_requests import LiveRequests
from gateway.router import Router
from gateway.routing import Chooser, RoutingPolicy
from gateway.service import InferenceService, ServiceLimits
from gateway.tokenizer import TemplateLimits
from gateway.tokenizer_store import TokenizerStore
from gateway.worker_dialer import WorkerDialer
from gateway.worker_link import LinkEvents, LinkTimes, WorkerLink
from gateway.worker_set import WorkerSet
from gateway.workers import Workers
from shared.auth import BearerTokenInterceptor
from shared.errors import SettingsError
from shared.exporter import metrics_exporter
from shared.grpc_options import MAX_MESSAGE_BYTES, channel_options, server_options
from shared.grpc_server import new_server
from shared.hang_up import hang_ups
from shared.health import Readiness
from shared.interceptors import server_interceptors
from shared.metrics import GatewayMetrics, GenerationMetrics
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.pb.tandem.v1 import inference_pb2_grpc as pb_grpc
from shared.reflection import enable_reflection
from shared.scheduling import batch_other_threads, batch_this_thread
from shared.shutdown import shutdown_event
from shared.tasks import TaskSet, first_of
from shared.tls import client_tls, server_credentials, server_tls
from shared.tokens import TokenStore
from shared.tracing import Tracer

_log = structlog.get_logger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
# For the last statuses to leave, once no request lives any more.
_CLOSE_GRACE_S = 1.0
# Until a process that shares its port listens although no worker is ready.
_FIRST_WORKER_S = 3.0

# Returns when a process may listen on the port that it shares, which is not before what it
# is given returns.
Turn: TypeAlias = Callable[[Awaitable[None]], Coroutine[Any, Any, None]]


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


async def serve(
    config: GatewayConfig, *, turn: Turn | None = None, tracer: Tracer | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises AddressInUseError, SettingsError.

    With a `turn` it is one of several processes that share the port.
    """
    tokens = _tokens(config)
    with (
        # Their parent says when to stop, and when that must be at once.
        shutdown_event(second_kills=turn is None) as stop,
        # From before its turn to the end of the drain, for a hang-up must not cut that short.
        hang_ups(tokens.look_again) if config.tokens_file else nullcontext(),
    ):
        async with running_gateway(
            config,
            tokens=tokens,
            turn=None if turn is None else partial(_turn_or_stop, turn, stop),
            on_first_worker=_settle,
            tracer=tracer,
        ) as gateway:
            _settle()
            _log.info("serving", listen=config.listen, port=gateway.port, workers=config.workers)
            await stop.wait()
            _log.info("draining", live_requests=len(gateway.live_requests))
    _log.info("stopped")


async def _turn_or_stop(turn: Turn, stop: asyncio.Event, first: Awaitable[None]) -> None:
    """One that is told to stop waits for no turn."""
    await first_of(turn(first), stop.wait())


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig,
    *,
    tokens: TokenStore | None = None,
    turn: Turn | None = None,
    on_first_worker: Callable[[], None] = lambda: None,
    tracer: Tracer | None = None,
    resolver: Resolver | None = None,
) -> AsyncIterator[RunningGateway]:
    """A gateway that serves inside the block and drains when the block is left.

    With a `turn` it shares its port with other processes, and listens when a worker is
    ready, or after some seconds without, and the turn has come: until then the others take
    the connections. `on_first_worker` is called once.
    """
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    live_requests = LiveRequests(config.max_live_requests, metrics.live_requests.set)
    readiness = Readiness(SERVICE_NAME)
    # First, because a file of theirs may be unfit.
    tokens, credentials = tokens or _tokens(config), _credentials(config)
    with (
        ThreadPoolExecutor(
            config.tokenizer_threads, "tokenizer", initializer=batch_this_thread
        ) as executor,
        metrics_exporter(registry, config.metrics_host, config.metrics_port),
    ):
        workers = _workers(config, executor, metrics, resolver or SystemResolver())
        router = workers.router
        service = _service(config, router, executor, live_requests, metrics.generations, tracer)
        server = _server(config, tokens, metrics, shares_port=turn is not None)
        pb_grpc.add_InferenceServiceServicer_to_server(service, server)
        enable_reflection(server, (SERVICE_NAME, "grpc.health.v1.Health"))
        await readiness.attach(server)
        async with TaskSet() as tasks:
            workers.start(tasks, readiness, on_first_worker)
            tasks.start(tokens.follow(), name="tokens")
            if turn is not None:
                await turn(workers.first_ready(_FIRST_WORKER_S))
            port = _bind(server, config.listen, credentials)
            await server.start()
            try:
                yield RunningGateway(port, readiness, router, live_requests, tokens)
            finally:
                await readiness.shut_down()
                await live_requests.drain(config.drain_grace_s)
                await server.stop(_CLOSE_GRACE_S)


def _settle() -> None:
    """What was made until now lives for ever, and threads that are there now help the loop's.

    Called twice: the tokenizer, with its tables, comes with the first worker.
    """
    gc.collect()
    gc.freeze()
    batch_other_threads()


def _workers(
    config: GatewayConfig,
    executor: ThreadPoolExecutor,
    metrics: GatewayMetrics,
    resolver: Resolver,
) -> Workers:
    changed = asyncio.Event()
    events = LinkEvents(
        on_change=changed.set,
        on_loss=metrics.worker_losses.inc,
        on_lag=metrics.hop_lag.observe,
        on_suspect=metrics.routing.breaker_opens.inc,
    )
    links = WorkerSet(_link_maker(config, executor, events))
    discovery = Discovery(
        map(worker_place, config.workers),
        links.update,
        resolver=resolver,
        interval_s=config.discovery_interval_s,
    )
    chooser = Chooser(RoutingPolicy(config.routing))
    router = Router(lambda: links.links, chooser, metrics.routing)
    on_num_ready = metrics.workers_ready.set
    return Workers(links, discovery, router, changed=changed, on_num_ready=on_num_ready)


def _link_maker(
    config: GatewayConfig, executor: ThreadPoolExecutor, events: LinkEvents
) -> Callable[[Endpoint], WorkerLink]:
    limits = TemplateLimits(max_chars=config.max_prompt_bytes, max_seconds=config.template_limit_s)
    tokenizers = TokenizerStore(executor, limits)
    times = LinkTimes(
        ping_interval_s=config.worker_silence_limit_s / 5,
        silence_limit_s=config.worker_silence_limit_s,
    )
    dialer = _dialer(config, times)

    def link(endpoint: Endpoint) -> WorkerLink:
        return WorkerLink(
            endpoint,
            tokenizers=tokenizers,
            dialer=dialer,
            times=times,
            breaker=Breaker(config.breaker_threshold, config.breaker_cool_down_s),
            events=events,
            coalesces=config.coalesce,
        )

    return link


def _dialer(config: GatewayConfig, times: LinkTimes) -> WorkerDialer:
    options = channel_options(
        # A smaller one is for clients: a worker's tokenizer and outputs must come through.
        max_message_bytes=max(config.max_message_bytes, MAX_MESSAGE_BYTES),
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
    metrics: GenerationMetrics,
    tracer: Tracer | None,
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
    return InferenceService(
        generator, router, encoder, live_requests, metrics, limits=limits, tracer=tracer
    )


def _server(
    config: GatewayConfig, tokens: TokenStore, metrics: GatewayMetrics, *, shares_port: bool
) -> grpc.aio.Server:
    interceptors = server_interceptors()
    if tokens.is_required:
        refused = metrics.unauthenticated_calls.inc
        interceptors.append(BearerTokenInterceptor(tokens.client_of, refused))
    elif config.client_metadata_key:
        interceptors.append(MetadataIdentityInterceptor(config.client_metadata_key))
    options = server_options(max_message_bytes=config.max_message_bytes, reuse_port=shares_port)
    return new_server(interceptors, options)


def _credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
    return None if tls is None else server_credentials(tls, _complain)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
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
