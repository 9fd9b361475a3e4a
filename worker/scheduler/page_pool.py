"""The free list of page ids. Knows nothing of who holds the others."""

import numpy as np

from worker.step import Int32Array


class PagePool:
    """A stack of free pages: the last ones given back are the first ones taken.

    Pages come out in the order in which they went in, at first ascending: an engine may read
    a run of neighbouring pages without gathering them.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_pages(self) -> int:
        return len(self._stack)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def free_pages(self) -> Int32Array:
        """A copy of the free list."""
        return self._stack[: self._num_free].copy()

    def take(self, count: int) -> Int32Array:
        assert count <= self._num_free, f"{count} pages wanted, {self._num_free} free"
        self._num_free -= count
        return self._stack[self._num_free : self._num_free + count][::-1].copy()

    def give(self, pages: Int32Array) -> None:
        end = self._num_free + len(pages)
        assert end <= len(self._stack), "a page was given back twice"
        self._stack[self._num_free : end] = pages[::-1]
        self._num_free = end
