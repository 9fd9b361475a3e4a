"""Where a worker's answers to one request wait for the request's coroutine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.logprobs import LogprobsBuffer, LogprobsPart
from shared.errors import ServingError
from shared.types import FinishReason


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker's scheduler took the request up."""

    cached_tokens: int
    queue_position: int
    queue_ms: float


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """The worker ended the request without an error."""

    reason: FinishReason
    # The eos or stop token that ended it, which is not among the tokens.
    matched_token_id: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float


class RequestChannel:
    """One request at one worker: filled by the link, emptied by the request's coroutine.

    A list and a future rather than a queue: tokens that come while the reader is busy
    merge at no cost, and never more wait than the request's max_tokens.
    """

    __slots__ = (
        "_abort",
        "_has_news",
        "_listener",
        "_loop",
        "_waiter",
        "end",
        "handle",
        "is_flowing",
        "logprobs",
        "prompt_logprobs",
        "started",
        "token_ids",
    )

    def __init__(self, handle: int, abort: Callable[[int], None]) -> None:
        self.handle = handle
        self.token_ids: list[int] = []
        # One to one with the tokens, and here before them. None: none came.
        self.logprobs: LogprobsBuffer | None = None
        self.prompt_logprobs: LogprobsBuffer | None = None
        self.started: WorkerStarted | None = None
        # Set once, after the last token.
        self.end: WorkerFinished | ServingError | None = None
        # Set by the reader after its first token: the others may wait for one another.
        self.is_flowing = False
        self._listener: Callable[[], None] | None = None
        self._abort = abort
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def request_abort(self) -> None:
        """Asks the worker to end it; its answer is a WorkerFinished of reason ABORTED."""
        self._abort(self.handle)

    def finish(self, end: WorkerFinished | ServingError) -> None:
        """The first end counts."""
        if self.end is None:
            self.end = end
            self.notify()

    def add_logprobs(self, part: LogprobsPart, *, is_prompt: bool) -> None:
        """Those of sampled tokens before the tokens themselves, which wake the reader."""
        if not is_prompt:
            if self.logprobs is None:
                self.logprobs = LogprobsBuffer()
            self.logprobs.extend(part)
            return
        if self.prompt_logprobs is None:
            self.prompt_logprobs = LogprobsBuffer()
        self.prompt_logprobs.extend(part)
        self.notify()

    def notify(self) -> None:
        """Wakes the reader after something was added."""
        if self._listener is not None:
            self._listener()
            return
        self._has_news = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when something was added since the last return. For one reader."""
        if not self._has_news:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._has_news = False

    def listen(self, listener: Callable[[], None] | None) -> None:
        """News go to the listener from now on; it must not raise. None: to who waits again,
        what has come already among them."""
        self._listener = listener
        if listener is None:
            self._has_news = True

    def take_tokens(self, limit: int) -> list[int]:
        """The oldest waiting tokens, at most `limit`; the next `wait` tells of the rest."""
        taken = self.token_ids
        if len(taken) <= limit:
            self.token_ids = []
            return taken
        self.token_ids = taken[limit:]
        self._has_news = True
        return taken[:limit]
