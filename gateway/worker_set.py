"""The links to all workers there are, while workers come and go."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from gateway.discovery import Endpoint
from gateway.worker_link import WorkerLink
from shared.tasks import TaskSet

_log = structlog.get_logger(__name__)


class WorkerSet:
    """Keeps a link to each worker that was found, and to those gone that have streams yet."""

    def __init__(self, make_link: Callable[[Endpoint], WorkerLink]) -> None:
        self._make_link = make_link
        self._links: dict[str, WorkerLink] = {}
        # Addresses of the workers that there are now.
        self._found: frozenset[str] = frozenset()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: TaskSet | None = None

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(self._links.values())

    def start(self, tasks: TaskSet) -> None:
        """Runs the links, those of now and of later, until the tasks are cancelled."""
        self._tasks = tasks
        for link in self._links.values():
            self._run(link, tasks)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the workers now."""
        found = {endpoint.address: endpoint for endpoint in endpoints}
        self._found = frozenset(found)
        for address, endpoint in found.items():
            known = self._links.get(address)
            if known is None:
                link = self._links[address] = self._make_link(endpoint)
                if self._tasks is not None:
                    self._run(link, self._tasks)
            elif known.is_retired:
                known.reinstate()
        self.retire_gone()

    def retire_gone(self) -> None:
        """Lets go of the workers that are not there any more: once a successor is ready.

        To be called whenever a link may have become ready, or ceased to be.
        """
        gone = [
            link
            for address, link in self._links.items()
            if address not in self._found and not link.is_retired
        ]
        has_successor = any(self._links[address].is_ready for address in self._found)
        for link in gone:
            # The last one goes with nobody in its place only if there shall be nobody.
            if has_successor or not self._found or not link.is_ready:
                self._retire(link)

    def _run(self, link: WorkerLink, tasks: TaskSet) -> None:
        self._running[link.address] = tasks.start(link.run(), name=f"link {link.address}")

    def _retire(self, link: WorkerLink) -> None:
        link.retire()
        if self._tasks is None:
            del self._links[link.address]
        else:
            self._tasks.start(self._see_off(link), name=f"retire {link.address}")

    async def _see_off(self, link: WorkerLink) -> None:
        """Its streams end by themselves; then the link goes, unless its worker is back."""
        await link.drained()
        if link.is_retired:
            del self._links[link.address]
            self._running.pop(link.address).cancel()
            _log.info("worker left", worker=link.address)
