"""A heap whose items may die in it, so that removing one costs nothing."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_SMALLEST_SWEEP = 64


class LazyHeap(Generic[T]):
    """Least key first. An item that `is_live` denies is as good as gone.

    Dead items are dropped when they come to the top, and all at once whenever they could
    be the greater part, so memory follows the live ones and each push costs O(log n).
    """

    def __init__(self, is_live: Callable[[T], bool]) -> None:
        self._is_live = is_live
        # The counter breaks ties, so that items are never compared.
        self._entries: list[tuple[tuple[float, ...], int, T]] = []
        self._pushed = 0
        self._sweep_at = _SMALLEST_SWEEP

    def push(self, key: tuple[float, ...], item: T) -> None:
        if len(self._entries) >= self._sweep_at:
            self._entries = [entry for entry in self._entries if self._is_live(entry[2])]
            heapq.heapify(self._entries)
            self._sweep_at = max(_SMALLEST_SWEEP, 2 * len(self._entries))
        heapq.heappush(self._entries, (key, self._pushed, item))
        self._pushed += 1

    def peek(self) -> tuple[tuple[float, ...], T] | None:
        """The least live item and its key."""
        while self._entries:
            key, _, item = self._entries[0]
            if self._is_live(item):
                return key, item
            heapq.heappop(self._entries)
        return None

    def pop(self) -> T:
        """Removes what `peek` shows; there must be something."""
        top = self.peek()
        assert top is not None
        heapq.heappop(self._entries)
        return top[1]
