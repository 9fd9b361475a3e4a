"""Telling any number of tasks that some state of the loop has changed."""

import asyncio
from collections.abc import Callable


class Notifier:
    """An event that every waiter sees once, and that needs no clearing."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def changed(self) -> None:
        """Returns after the next `notify`."""
        await self._event.wait()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Returns when the predicate holds; it is asked now and at each `notify`."""
        while not predicate():
            await self._event.wait()
