"""The workers of a gateway as one: found, linked, chosen from; its readiness follows them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gateway.discovery import Discovery
from gateway.router import Router
from gateway.worker_set import WorkerSet
from shared.health import Readiness
from shared.tasks import TaskSet


class Workers:
    """What keeps the links to the workers, and tells when there are some."""

    def __init__(
        self,
        links: WorkerSet,
        discovery: Discovery,
        router: Router,
        *,
        changed: asyncio.Event,
        on_num_ready: Callable[[int], None],
    ) -> None:
        """`changed` is set by the links whenever one of them may be ready or no more."""
        self.router = router
        self._links = links
        self._discovery = discovery
        self._changed = changed
        self._on_num_ready = on_num_ready
        self._has_been_ready = asyncio.Event()

    def start(
        self, tasks: TaskSet, readiness: Readiness, on_first_worker: Callable[[], None]
    ) -> None:
        """Runs all of it until the tasks are cancelled."""
        self._links.start(tasks)
        tasks.start(self._discovery.run(), name="discovery")
        tasks.start(self._follow(readiness, on_first_worker), name="readiness")

    async def first_ready(self, timeout_s: float) -> None:
        """Returns when a worker has been ready, or when that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_been_ready.wait()

    async def _follow(self, readiness: Readiness, on_first_worker: Callable[[], None]) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._links.retire_gone()
            num_ready = self.router.num_ready
            self._on_num_ready(num_ready)
            await (readiness.set_serving() if num_ready else readiness.set_not_serving())
            if num_ready and not self._has_been_ready.is_set():
                self._has_been_ready.set()
                on_first_worker()
