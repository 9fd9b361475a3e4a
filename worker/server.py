"""Composition root of the front process, and the order in which it ends."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health
from prometheus_client import CollectorRegistry

from shared.auth import BearerTokenInterceptor
from shared.errors import SettingsError, UnavailableError
from shared.exporter import metrics_exporter
from shared.grpc_options import server_options
from shared.grpc_server import new_server
from shared.hang_up import hang_ups
from shared.health import Readiness
from shared.interceptors import server_interceptors
from shared.metrics import WorkerMetrics, register_load
from shared.pb.tandem.worker.v1 import worker_pb2_grpc
from shared.reflection import enable_reflection
from shared.scheduling import batch_other_threads
from shared.tasks import TaskSet
from shared.tls import server_credentials, server_tls
from shared.tokens import TokenStore
from shared.tracing import Tracer
from shared.version import tandem_version
from worker.config import WorkerConfig
from worker.dispatcher import Dispatcher, DispatcherLimits
from worker.engine_process import EngineProcess, EngineStartError, EngineSupervisor
from worker.service import SERVICE_NAME, ServedLimits, WorkerService

# For links to send what they have, and for handlers to run their `finally`.
_LINK_FLUSH_S = 2.0
_STOP_GRACE_S = 1.0

_log = structlog.get_logger(__name__)


class ListenError(Exception):
    """An address of ours cannot be listened on."""


async def serve(
    config: WorkerConfig,
    first: EngineProcess,
    spawn: Callable[[], EngineProcess],
    stop: asyncio.Event,
    *,
    tracer: Tracer | None = None,
    on_listening: Callable[[int], None] | None = None,
) -> None:
    """Serves until `stop` is set, then drains and returns.

    `first` is an engine process that was spawned before any gRPC object existed; `spawn`
    makes its successors. `on_listening` is told the port as soon as it is bound, which is
    long before the model is ready. Raises ListenError, SettingsError for a file that cannot
    be used, and EngineStartError when the engine cannot be kept up. However it ends, no
    process is left.
    """
    supervisor = EngineSupervisor(
        spawn,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
    )
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    dispatcher = Dispatcher(supervisor.send, _limits(config), metrics, tracer)
    register_load(registry, lambda: dispatcher.load)
    readiness = Readiness(SERVICE_NAME)
    async with AsyncExitStack() as stack:
        stack.callback(first.end)
        _export(stack, registry, config)
        tokens = TokenStore((), Path(config.tokens_file) if config.tokens_file else None)
        if config.tokens_file:
            stack.enter_context(hang_ups(tokens.look_again))
        server = await _build_server(config, dispatcher, readiness, _interceptors(tokens, metrics))
        port = _bind(server, config)
        tasks = await stack.enter_async_context(TaskSet())
        await server.start()
        stack.push_async_callback(server.stop, None)
        _log.info("listening", address=config.listen, port=port)
        if on_listening is not None:
            on_listening(port)
        supervision = tasks.start(_supervise(supervisor, first, dispatcher), name="engine")
        tasks.start(_report_health(dispatcher, readiness), name="health")
        tasks.start(tokens.follow(), name="tokens")
        # What lives now lives for ever; a full collection must not look at it again.
        gc.collect()
        gc.freeze()
        batch_other_threads()
        stopping = tasks.start(stop.wait(), name="stop")
        await asyncio.wait((supervision, stopping), return_when=asyncio.FIRST_COMPLETED)
        supervisor.stop_restarting()
        await readiness.shut_down()
        await _drain(dispatcher, config.drain_grace_s)
        await _stop_server(server, dispatcher)
        await supervisor.stop()
        error = await supervision
    if error is not None:
        raise error
    _log.info("stopped")


async def _drain(dispatcher: Dispatcher, grace_s: float) -> None:
    """Refuses new requests, lets the live ones end, and fails those that take too long."""
    num_live = dispatcher.drain()
    _log.info("draining", live_requests=num_live, grace_s=grace_s)
    try:
        async with asyncio.timeout(grace_s):
            await dispatcher.state.until(lambda: dispatcher.num_live == 0)
    except TimeoutError:
        _log.warning("drain grace is over", live_requests=dispatcher.num_live)
        dispatcher.fail_live(UnavailableError("worker is shutting down"))


async def _stop_server(server: grpc.aio.Server, dispatcher: Dispatcher) -> None:
    """Ends the links once they have sent what they have, then the server.

    `Server.stop` may return before the handlers it cancelled have run their `finally`, so
    the links are waited for by themselves.
    """
    dispatcher.close_links(UnavailableError("worker is shutting down"))
    await _at_most(_LINK_FLUSH_S, dispatcher.state.until(lambda: dispatcher.num_links == 0))
    await server.stop(_STOP_GRACE_S)
    await _at_most(_LINK_FLUSH_S, dispatcher.state.until(lambda: dispatcher.num_links == 0))


async def _supervise(
    supervisor: EngineSupervisor, first: EngineProcess, dispatcher: Dispatcher
) -> EngineStartError | None:
    """Runs to the end of the engine; the error is for `serve` to raise when all has ended."""
    try:
        await supervisor.run(first, dispatcher)
    except EngineStartError as error:
        return error
    return None


async def _report_health(dispatcher: Dispatcher, readiness: Readiness) -> None:
    """Keeps health in step with what the dispatcher would answer."""
    while True:
        is_accepting = dispatcher.is_accepting
        if is_accepting != readiness.is_serving:
            _log.info("health", serving=is_accepting)
            await (readiness.set_serving() if is_accepting else readiness.set_not_serving())
        await dispatcher.state.until(lambda: dispatcher.is_accepting != readiness.is_serving)


async def _build_server(
    config: WorkerConfig,
    dispatcher: Dispatcher,
    readiness: Readiness,
    interceptors: list[grpc.aio.ServerInterceptor],
) -> grpc.aio.Server:
    options = server_options(max_message_bytes=config.max_message_bytes)
    server = new_server(interceptors, options)
    limits = ServedLimits(
        default_max_tokens=config.default_max_tokens,
        max_waiting=config.max_waiting,
        version=tandem_version(),
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(dispatcher, limits), server)
    await readiness.attach(server)
    enable_reflection(server, (SERVICE_NAME, health.SERVICE_NAME))
    return server


def _interceptors(tokens: TokenStore, metrics: WorkerMetrics) -> list[grpc.aio.ServerInterceptor]:
    interceptors = server_interceptors()
    if tokens.is_required:
        refused = metrics.unauthenticated_calls.inc
        interceptors.append(BearerTokenInterceptor(tokens.client_of, refused))
    return interceptors


def _bind(server: grpc.aio.Server, config: WorkerConfig) -> int:
    tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
    try:
        if tls is None:
            return server.add_insecure_port(config.listen)
        return server.add_secure_port(config.listen, server_credentials(tls, _complain))
    except RuntimeError as error:
        raise ListenError(f"--listen: cannot listen on {config.listen}: {error}") from error


def _complain(error: SettingsError) -> None:
    _log.error("certificate not read; the former one stays", reason=str(error))


def _export(stack: AsyncExitStack, registry: CollectorRegistry, config: WorkerConfig) -> None:
    host, port = config.metrics_host, config.metrics_port
    try:
        stack.enter_context(metrics_exporter(registry, host, port))
    except OSError as error:
        raise ListenError(f"--metrics-port: cannot listen on {host}:{port}: {error}") from error


def _limits(config: WorkerConfig) -> DispatcherLimits:
    assert config.max_running is not None
    return DispatcherLimits(max_running=config.max_running, max_waiting=config.max_waiting)


async def _at_most(timeout_s: float, work: Awaitable[None]) -> None:
    """Waits for the work, but no longer than this."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await work
