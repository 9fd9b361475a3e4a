"""Joins the gateways' links and the engine: admits, counts, and passes each its own.

Owns every live request of the front. Runs on the event loop alone and never blocks it;
knows nothing of gRPC contexts or processes.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import structlog

from shared.errors import (
    AlreadyExistsError,
    EngineError,
    InvalidArgumentError,
    QueueFullError,
    ServingError,
    UnavailableError,
)
from shared.limits import MAX_COMPLETIONS
from shared.metrics import WorkerMetrics
from shared.notifier import Notifier
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.tracing import Tracer
from worker.availability import RETRY_AFTER_MS, Availability
from worker.convert import (
    HANDLE_BITS,
    to_failure,
    to_load_response,
    to_new_request,
    uid_of,
)
from worker.engine_calls import EngineCalls
from worker.link import Link, LinkLimits, RequestKey
from worker.links import Links
from worker.messages import (
    Abort,
    CachedPrefixes,
    CacheFlushed,
    Command,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Load,
    NewRequest,
    Ready,
    StepOutput,
    Submit,
    Traced,
)
from worker.request_spans import RequestSpans
from worker.waiting_shares import WaitingShares

LOAD_INTERVAL_S = 0.25

_log = structlog.get_logger(__name__)

_DISPLACED = QueueFullError(
    "the queue is full, and others, who have less in it, need room",
    retry_after_ms=RETRY_AFTER_MS,
)


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    """How much is taken on at once."""

    max_running: int
    max_waiting: int
    link: LinkLimits = LinkLimits()


class Dispatcher:
    """Every request goes through here twice: as a Submit down, as its entries up."""

    def __init__(
        self,
        send: Callable[[Command], None],
        limits: DispatcherLimits,
        metrics: WorkerMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._send = send
        self._limits = limits
        self._metrics = metrics
        self._spans = RequestSpans(tracer)
        self._availability = Availability()
        self._links = Links(limits.link)
        # (public id, index of the completion) of each live request -> uid.
        self._uids: dict[RequestKey, int] = {}
        self._shares = WaitingShares()
        self._calls = EngineCalls(send)
        self._prefixes = pb.CachedPrefixes()
        self._load = Load()
        self._load_sent_at = 0.0
        # Told whenever `is_accepting` may have changed, a link has gone, or nothing lives.
        self.state = Notifier()

    @property
    def load(self) -> Load:
        """As the engine last told it."""
        return self._load

    @property
    def num_live(self) -> int:
        return len(self._uids)

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def is_accepting(self) -> bool:
        return self._availability.refusal() is None

    def ready(self) -> tuple[Ready, str]:
        """What is served, and the id of this start of the engine. Raises UnavailableError."""
        return self._availability.served()

    def load_response(self) -> pb.GetLoadResponse:
        return to_load_response(self._load, is_ready=self.is_accepting)

    def open_link(self) -> Link:
        link = self._links.open()
        self._metrics.links.inc()
        _log.debug("gateway connected", link=link.link_id)
        link.report_load(self.load_response())
        link.report_prefixes(self._prefixes)
        return link

    def close_link(self, link: Link) -> None:
        """Aborts whatever still lives on the link, and forgets it."""
        self._abort_silently(link, list(link.live))
        self._links.close(link)
        self._metrics.links.dec()
        _log.debug("gateway left", link=link.link_id)
        self.state.notify()

    def obey(self, link: Link, request: pb.RunRequest) -> None:
        """Carries out one command. Raises ServingError for one that must end its link."""
        match request.WhichOneof("command"):
            case "submit":
                self._submit(link, request.submit)
            case "abort":
                self._abort(link, request.abort.handles, reply=request.abort.reply)
            case "ping":
                pong = pb.Pong(nonce=request.ping.nonce, unix_us=int(1e6 * time.time()))
                link.answer(pb.RunResponse(pong=pong))
            case _:
                raise InvalidArgumentError("command", "none is set")

    def abort_ids(self, request_ids: Iterable[str]) -> list[str]:
        """Ends live requests by their public ids, over whichever link they came.

        All completions of an id end together.
        """
        uids: dict[str, list[int]] = {}
        for request_id in dict.fromkeys(request_ids):
            for index in range(MAX_COMPLETIONS):
                uid = self._uids.get((request_id, index))
                if uid is not None:
                    uids.setdefault(request_id, []).append(uid)
        if uids:
            self._send(Abort(tuple(chain.from_iterable(uids.values())), report=True))
        return list(uids)

    async def flush_cache(self) -> int:
        """Pages freed. Raises UnavailableError."""
        self.ready()
        return await self._calls.flush_cache()

    async def trace(self, num_steps: int) -> bytes:
        """A gzipped Chrome trace of the next steps. Raises UnavailableError."""
        self.ready()
        return await self._calls.trace(num_steps)

    def on_event(self, event: Event) -> None:
        if self._availability.silent_s:
            self._availability.silent_s = 0.0
            self.state.notify()
        match event:
            case StepOutput():
                self._on_output(event)
                self._set_load(event.load)
            case Heartbeat(load=load):
                self._set_load(load)
            case Ready():
                self._availability.engine_is_ready(event)
                num_pages = event.engine.num_pages
                self._load = Load(pages_total=num_pages, pages_free=num_pages)
                self.state.notify()
                self._report_load()
            case CachedPrefixes(fingerprints):
                self._prefixes = pb.CachedPrefixes(hashes=fingerprints)
                self._report_prefixes()
            case CacheFlushed() | Traced():
                self._calls.answer(event)

    def on_engine_stale(self, silent_s: float) -> None:
        if not self._availability.silent_s:
            _log.error("the engine is silent", silent_s=round(silent_s, 1))
        self._availability.silent_s = silent_s
        self.state.notify()

    def on_engine_lost(self) -> None:
        self._availability.engine_is_lost()
        self._load = Load()
        self._metrics.engine_losses.inc()
        # What never ran cannot be what killed it, so another worker may try it.
        self._fail(
            self._links.waiting_uids(),
            UnavailableError(
                "the engine process died before this request ran", retry_after_ms=RETRY_AFTER_MS
            ),
        )
        self.fail_live(EngineError("the engine process died, and this request with it"))
        self._calls.fail_all(UnavailableError("the engine process died"))
        # The next one begins with an empty cache.
        self._prefixes = pb.CachedPrefixes()
        self._report_prefixes()
        self.state.notify()
        self._report_load()

    def drain(self) -> int:
        """Refuses new requests from now on; how many still live."""
        self._availability.is_draining = True
        self.state.notify()
        self._report_load()
        return self.num_live

    def fail_live(self, error: ServingError) -> None:
        """Ends every live request with this error; the engine is told to drop them."""
        uids = tuple(self._uids.values())
        self._fail(uids, error)
        if uids:
            self._send(Abort(uids, report=False))

    def close_links(self, error: ServingError) -> None:
        """Lets each link send what it has, and ends it."""
        for link in self._links:
            link.close(error)

    def _submit(self, link: Link, submit: pb.Submit) -> None:
        handle = submit.handle
        if handle >> HANDLE_BITS:
            raise InvalidArgumentError("handle", f"must fit in {HANDLE_BITS} bits, got {handle}")
        if handle in link.live:
            raise InvalidArgumentError("handle", f"{handle} is live on this stream already")
        num_ahead = self._links.num_waiting
        try:
            self._admit(link, submit)
        except ServingError as error:
            self._metrics.rejections.labels(error.code.name).inc()
            rejected = pb.Rejected(handle=handle, failure=to_failure(error))
            link.answer(pb.RunResponse(rejected=rejected))
            return
        accepted = pb.Accepted(handle=handle, queue_position=num_ahead)
        link.answer(pb.RunResponse(accepted=accepted))

    def _admit(self, link: Link, submit: pb.Submit) -> None:
        refusal = self._availability.refusal()
        if refusal is not None:
            raise refusal
        served, _ = self._availability.served()
        uid = uid_of(link.link_id, submit.handle)
        request = to_new_request(submit, uid, served.engine, time.monotonic())
        key = (submit.request_id, submit.index)
        if key in self._uids:
            raise AlreadyExistsError(f"request_id: {submit.request_id} is live already")
        # Counted here, so that the answer is at once even while a long step runs.
        limit = self._limits.max_running + self._limits.max_waiting
        if self.num_live >= limit and not self._make_room(request):
            raise QueueFullError(
                f"{self.num_live} requests are live; at most {self._limits.max_running} run "
                f"and {self._limits.max_waiting} wait",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._uids[key] = uid
        link.live[submit.handle] = key
        link.waiting.add(submit.handle)
        self._shares.add(uid, request.client, request.priority)
        self._spans.open(uid, submit)
        self._send(Submit(request))

    def _make_room(self, request: NewRequest) -> bool:
        """Ends a waiting request of a client that has more than its share, if one does."""
        uid = self._shares.displaced_by(request.client, request.priority)
        if uid is None:
            return False
        self._metrics.rejections.labels(_DISPLACED.code.name).inc()
        self._fail([uid], _DISPLACED)
        # Before the newcomer, so that the scheduler has room for it, too.
        self._send(Abort((uid,), report=False))
        return True

    def _abort(self, link: Link, handles: Iterable[int], *, reply: bool) -> None:
        # What is not live has ended already, and its end has been told.
        live = [handle for handle in handles if handle in link.live]
        if reply and live:
            uids = tuple(uid_of(link.link_id, handle) for handle in live)
            self._send(Abort(uids, report=True))
        elif live:
            self._abort_silently(link, live)

    def _abort_silently(self, link: Link, handles: list[int]) -> None:
        for handle in handles:
            self._shares.remove(uid_of(link.link_id, handle))
            key = link.forget(handle)
            if key is not None:
                self._forget(key, "ABANDONED")
                self._spans.close(uid_of(link.link_id, handle), None)
        if handles:
            uids = tuple(uid_of(link.link_id, handle) for handle in handles)
            self._send(Abort(uids, report=False))

    def _on_output(self, output: StepOutput) -> None:
        committed_at = output.committed_at
        for started in output.started:
            self._shares.remove(started.uid)
            link = self._links.of(started.uid)
            if link is not None:
                link.push_started(started, committed_at)
        # In this order: the link may end a message before a prompt's and after the tokens,
        # and what belongs to a token must be in one message with it.
        for logprobs in sorted(output.logprobs, key=lambda one: not one.is_prompt):
            self._links.push_logprobs(logprobs, committed_at)
        self._links.push_tokens(output)
        endings: tuple[Finished | Failed, ...] = output.finished + output.failed
        for ended in endings:
            self._end(ended, committed_at)

    def _end(self, ended: Finished | Failed, committed_at: float) -> None:
        """Passes a terminal entry on; one for a request that has ended already is dropped."""
        self._shares.remove(ended.uid)
        link = self._links.of(ended.uid)
        key = link.push_ended(ended, committed_at) if link is not None else None
        if key is None:
            return
        self._spans.close(ended.uid, ended)
        if isinstance(ended, Failed):
            self._forget(key, ended.code.name)
            return
        self._forget(key, ended.reason.name)
        self._metrics.queue_time.observe(ended.queue_s)
        self._metrics.prefill_time.observe(ended.prefill_s)
        self._metrics.decode_time.observe(ended.decode_s)

    def _fail(self, uids: Iterable[int], error: ServingError) -> None:
        now = time.monotonic()
        for uid in uids:
            failed = Failed(uid, error.code, error.message, error.field, error.retry_after_ms)
            self._end(failed, now)

    def _forget(self, key: RequestKey, outcome: str) -> None:
        del self._uids[key]
        self._metrics.requests.labels(outcome).inc()
        if not self._uids:
            self.state.notify()

    def _set_load(self, load: Load) -> None:
        self._load = load
        if time.monotonic() - self._load_sent_at >= LOAD_INTERVAL_S:
            self._report_load()

    def _report_prefixes(self) -> None:
        for link in self._links:
            link.report_prefixes(self._prefixes)

    def _report_load(self) -> None:
        self._load_sent_at = time.monotonic()
        for link in self._links:
            link.report_load(self.load_response())
