"""Questions to the engine process that wait for its answer."""

import asyncio
import itertools
from collections.abc import Callable

from shared.errors import ServingError
from worker.messages import CacheFlushed, Command, FlushCache, Trace, Traced


class EngineCalls:
    """The calls under way. Runs on the event loop alone."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._calls: dict[int, asyncio.Future[CacheFlushed | Traced]] = {}
        self._ids = itertools.count(1)

    async def flush_cache(self) -> int:
        """Pages freed. Raises what `fail_all` is given."""
        answer = await self._call(FlushCache)
        assert isinstance(answer, CacheFlushed)
        return answer.pages_freed

    async def trace(self, num_steps: int) -> bytes:
        """A gzipped Chrome trace of the next steps. Raises what `fail_all` is given."""
        answer = await self._call(lambda call_id: Trace(call_id, num_steps))
        assert isinstance(answer, Traced)
        return answer.trace_json_gz

    def answer(self, event: CacheFlushed | Traced) -> None:
        future = self._calls.pop(event.call_id, None)
        if future is not None and not future.done():
            future.set_result(event)

    def fail_all(self, error: ServingError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    async def _call(self, command: Callable[[int], FlushCache | Trace]) -> CacheFlushed | Traced:
        call_id = next(self._ids)
        future: asyncio.Future[CacheFlushed | Traced] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(command(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)
