"""The gateway's side of one worker: connects, learns its model, and connects again."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from gateway.affinity import PrefixMemory
from gateway.backoff import RETRY_AFTER_MS, Backoff, Breaker
from gateway.channel import RequestChannel
from gateway.discovery import Endpoint
from gateway.request import Submission
from gateway.served_model import ModelInfo, ServedModel
from gateway.tokenizer_store import TokenizerStore, bundle_digest
from gateway.worker_dialer import Dialled, WorkerDialer
from gateway.worker_session import RunCall, WorkerSession
from shared.errors import Code, ServingError, UnavailableError
from shared.interceptors import error_from_rpc
from shared.notifier import Notifier
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.pb.tandem.worker.v1 import worker_pb2_grpc as pb_grpc
from shared.tasks import TaskSet

_log = structlog.get_logger(__name__)

# What most workers have.
_UNTOLD_PAGE_SIZE = 16
_SERVER_FAULTS = {Code.INTERNAL, Code.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How long a link waits for what, in seconds."""

    # Calls that a healthy worker answers at once.
    call_timeout_s: float = 5.0
    first_retry_s: float = 0.05
    # Short, because an attempt costs next to nothing and a worker may be back any moment.
    max_retry_s: float = 0.25
    ping_interval_s: float = 2.0
    # Without a sign of the worker until it counts as lost.
    silence_limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Whom a link tells what."""

    # It became ready, or ceased to be.
    on_change: Callable[[], None]
    # It was ready and broke.
    on_loss: Callable[[], None]
    # Seconds that a step's output took to come here; once for each.
    on_lag: Callable[[float], None]
    # Its answers were faults so often that others are preferred for a while.
    on_suspect: Callable[[], None]


class WorkerLink:
    """One worker: whether it can take requests, and the way to send it some."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        tokenizers: TokenizerStore,
        dialer: WorkerDialer,
        times: LinkTimes,
        breaker: Breaker,
        events: LinkEvents,
        coalesces: bool,
    ) -> None:
        self.address = endpoint.address
        # What has been sent and told of its prefix cache.
        self.prefixes = PrefixMemory()
        # Its worker has gone from the list: no new requests, and the end after the last one.
        self.is_retired = False
        self._endpoint = endpoint
        self._tokenizers = tokenizers
        self._dialer = dialer
        self._times = times
        self._breaker = breaker
        self._events = events
        self._coalesces = coalesces
        self._backoff = Backoff(times.first_retry_s, times.max_retry_s)
        self._stub: pb_grpc.WorkerServiceStub | None = None
        self._session: WorkerSession | None = None
        self._model: ServedModel | None = None
        self._is_model_known = False
        # As the worker told it last over the session's stream.
        self._load = pb.GetLoadResponse()
        self._load_changed = Notifier()
        self._num_of_others = 0
        self._changed_hands = Notifier()
        self._last_complaint = ""

    @property
    def model(self) -> ServedModel | None:
        """What it serves, once that is known; the last known while it is away."""
        return self._model

    @property
    def is_ready(self) -> bool:
        return self._is_model_known and self._load.ready and not self.is_retired

    @property
    def num_live(self) -> int:
        """Requests of this gateway that it works on."""
        return self._session.num_live if self._session else 0

    @property
    def num_outstanding(self) -> int:
        """Requests that run or wait there: this gateway's of now, others' as told last."""
        return self.num_live + self._num_of_others

    @property
    def page_size(self) -> int:
        return (self._model and self._model.info.page_size) or _UNTOLD_PAGE_SIZE

    @property
    def capacity(self) -> int:
        """Requests that run at once."""
        return (self._model and self._model.info.max_running) or 1

    @property
    def is_full(self) -> bool:
        """Whether it would refuse one more."""
        info = self._model and self._model.info
        return bool(
            info
            and info.max_running
            and self.num_outstanding >= info.max_running + info.max_waiting
        )

    def retire(self) -> None:
        """It is not ready any more; what lives on it goes on."""
        self.is_retired = True
        self._events.on_change()

    def reinstate(self) -> None:
        """It is as it was before it retired."""
        self.is_retired = False
        self._changed_hands.notify()
        self._events.on_change()

    async def drained(self) -> None:
        """Returns when it is retired and nothing lives on it, or when it is reinstated."""
        await self._changed_hands.until(lambda: not self.is_retired or not self.num_live)

    def is_suspect(self, now: float) -> bool:
        """Whether its last answers were faults of its own."""
        return self._breaker.is_open(now)

    async def run(self) -> None:
        """Keeps the link up for as long as it is not cancelled."""
        while True:
            async with self._dialer.dial(self.address, self._endpoint.server_name) as dialled:
                self._stub = pb_grpc.WorkerServiceStub(dialled.channel)
                await self._attempt_again_and_again(dialled)

    @contextmanager
    def open(self, submission: Submission) -> Iterator[RequestChannel]:
        """A request at this worker; leaving the block aborts it unless it has ended.

        Raises UnavailableError when the link is down.
        """
        session = self._session
        if session is None:
            raise _away()
        channel = session.submit(submission)
        try:
            yield channel
        finally:
            session.close(channel)
            self._changed_hands.notify()
            if not session.is_lost:
                self._judge(channel)

    async def get_load(self) -> pb.GetLoadResponse:
        """Asked anew; not ready when the worker does not answer."""
        if self._stub is None or self._session is None:
            return pb.GetLoadResponse(ready=False)
        try:
            load: pb.GetLoadResponse = await self._stub.GetLoad(
                pb.GetLoadRequest(), timeout=self._times.call_timeout_s
            )
        except grpc.aio.AioRpcError:
            return pb.GetLoadResponse(ready=False)
        return load

    async def flush_cache(self) -> int:
        """Pages freed."""
        if self._stub is None or self._session is None:
            return 0
        try:
            answer: pb.FlushCacheResponse = await self._stub.FlushCache(
                pb.FlushCacheRequest(), timeout=self._times.call_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise _away() from error
            raise error_from_rpc(error) from error
        self.prefixes.forget()
        return answer.pages_freed

    async def abort(self, request_ids: list[str]) -> set[str]:
        """Ends requests by their public ids, whichever gateway sent them. Those that lived."""
        if self._stub is None or self._session is None:
            return set()
        try:
            answer = await self._stub.Abort(
                pb.AbortRequest(request_ids=request_ids), timeout=self._times.call_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            # A worker that is going away ends its requests anyhow.
            _log.warning("abort failed", worker=self.address, error=error.details())
            return set()
        return set(answer.aborted_request_ids)

    async def _attempt_again_and_again(self, dialled: Dialled) -> None:
        """Returns when a channel made now would bring other certificates."""
        async with TaskSet() as attempts:
            while not dialled.is_stale():
                # A task of its own: a TaskGroup that is ending may swallow the
                # cancellation of the task that it is in, which must not be this one.
                attempt = attempts.start(self._attempt(), name=f"attempt {self.address}")
                await asyncio.wait({attempt})
                await asyncio.sleep(self._backoff.next_s())

    async def _attempt(self) -> None:
        assert self._stub is not None
        try:
            await self._connect_and_serve(self._stub)
        except ExceptionGroup as group:
            self._complain(_first(group))

    async def _connect_and_serve(self, stub: pb_grpc.WorkerServiceStub) -> None:
        self._load = pb.GetLoadResponse()
        call: RunCall = stub.Run()
        session = WorkerSession(
            self.address,
            call,
            ping_interval_s=self._times.ping_interval_s,
            silence_limit_s=self._times.silence_limit_s,
            on_load=self._take_load,
            on_lag=self._events.on_lag,
            on_prefixes=self.prefixes.tell,
            coalesces=self._coalesces,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.run())
                tasks.create_task(self._follow(stub, session))
        finally:
            self._is_model_known = False
            if self._session is not None:
                self._session = None
                # Whoever comes back begins with an empty cache.
                self.prefixes.forget()
                self._changed_hands.notify()
                if not self.is_retired:
                    self._record_fault()
                    self._events.on_loss()
                self._events.on_change()

    async def _follow(self, stub: pb_grpc.WorkerServiceStub, session: WorkerSession) -> None:
        """Ready when the worker says so and its model is known; anew after each pause of its."""
        while True:
            await self._load_changed.until(lambda: self._load.ready)
            # Asked for on an open stream: whoever answers is whom the stream is with.
            self._model = model = await self._learn_model(stub)
            self._session = session
            self._is_model_known = True
            self._backoff.reset()
            self._last_complaint = ""
            self._events.on_change()
            _log.info("worker ready", worker=self.address, model=model.info.name)
            await self._load_changed.until(lambda: not self._load.ready)
            self._is_model_known = False
            self._events.on_change()
            _log.info("worker not ready", worker=self.address)

    async def _learn_model(self, stub: pb_grpc.WorkerServiceStub) -> ServedModel:
        info = _model_info(
            await stub.GetModel(pb.GetModelRequest(), timeout=self._times.call_timeout_s)
        )

        async def fetch() -> Mapping[str, bytes]:
            return await self._fetch_tokenizer(stub, info.tokenizer_sha256)

        tokenizer = await self._tokenizers.get(info.tokenizer_sha256, info.vocab_size, fetch)
        return ServedModel(info, tokenizer)

    async def _fetch_tokenizer(
        self, stub: pb_grpc.WorkerServiceStub, sha256: str
    ) -> Mapping[str, bytes]:
        files: dict[str, bytearray] = {}
        request = pb.GetTokenizerRequest()
        async for part in stub.GetTokenizer(request, timeout=10 * self._times.call_timeout_s):
            if part.sha256 != sha256:
                raise UnavailableError(f"worker {self.address} changed its tokenizer meanwhile")
            files.setdefault(part.file_name, bytearray()).extend(part.chunk)
        fetched = {name: bytes(content) for name, content in files.items()}
        if bundle_digest(fetched) != sha256:
            raise UnavailableError(f"worker {self.address} sent a damaged tokenizer")
        return fetched

    def _take_load(self, load: pb.GetLoadResponse) -> None:
        has_changed = load.ready != self._load.ready
        self._load = load
        self._num_of_others = max(0, load.running + load.waiting - self.num_live)
        if has_changed:
            self._load_changed.notify()

    def _judge(self, channel: RequestChannel) -> None:
        """A client's error says nothing of the worker, nor does one that left unserved."""
        if isinstance(channel.end, ServingError):
            if channel.end.code in _SERVER_FAULTS:
                self._record_fault()
        elif channel.started is not None:
            self._breaker.record_success()

    def _record_fault(self) -> None:
        if self._breaker.record_fault(asyncio.get_running_loop().time()):
            self._events.on_suspect()

    def _complain(self, error: BaseException) -> None:
        """Once for each new reason: a worker may be away for hours."""
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if reason == self._last_complaint:
            return
        self._last_complaint = reason or ""
        is_expected = isinstance(error, (grpc.aio.AioRpcError, ServingError))
        _log.warning(
            "worker not connected",
            worker=self.address,
            reason=reason,
            exc_info=None if is_expected else error,
        )


def _away() -> UnavailableError:
    """For clients: no address, nor gRPC's words, which hold it."""
    return UnavailableError("the worker is away", retry_after_ms=RETRY_AFTER_MS)


def _first(group: ExceptionGroup[Exception]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _model_info(answer: pb.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        name=answer.model,
        architecture=answer.architecture,
        dtype=answer.dtype,
        device=answer.device,
        vocab_size=answer.vocab_size,
        max_context_tokens=answer.max_context_tokens,
        default_max_tokens=answer.default_max_tokens,
        eos_token_ids=tuple(answer.eos_token_ids),
        tokenizer_sha256=answer.tokenizer_sha256,
        worker_version=answer.version,
        overlap_scheduling=answer.overlap_scheduling,
        page_size=answer.page_size,
        max_running=answer.max_running,
        max_waiting=answer.max_waiting,
    )
