"""The host's page table, its row allocator, and what of it the engine has not seen yet."""

import numpy as np

from worker.step import IndexArray, Int32Array

_NONE = np.empty(0, np.int32)


class PageTable:
    """Row r's KV is in pages[r, :num_pages[r]]; column c holds tokens from c * page_size on.

    The first num_shared[r] of them belong to the radix tree, the rest to the row alone. The
    first num_synced[r] columns have been sent to the engine as they are.
    """

    def __init__(self, max_rows: int, max_columns: int) -> None:
        self.pages = np.zeros((max_rows, max_columns), np.int32)
        self.num_pages = np.zeros(max_rows, np.int32)
        self.num_shared = np.zeros(max_rows, np.int32)
        self.num_synced = np.zeros(max_rows, np.int32)
        # What num_synced was before the row's latest plan.
        self._resend_from = np.zeros(max_rows, np.int32)
        self._free_rows = list(range(max_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def free_rows(self) -> list[int]:
        return list(self._free_rows)

    def acquire_row(self) -> int:
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self.num_pages[row] = self.num_shared[row] = self.num_synced[row] = 0
        self._free_rows.append(row)

    def append(self, row: int, pages: Int32Array) -> None:
        start = self.num_pages[row]
        self.pages[row, start : start + len(pages)] = pages
        self.num_pages[row] = start + len(pages)

    def append_one_each(self, rows: IndexArray, pages: Int32Array) -> None:
        columns = self.num_pages[rows]
        self.pages[rows, columns] = pages
        self.num_pages[rows] = columns + 1

    def replace(self, row: int, first: int, pages: Int32Array) -> Int32Array:
        """Puts `pages` in the columns from `first` on; returns those they replace."""
        current = self.pages[row, first : first + len(pages)]
        changed = (current != pages).nonzero()[0]
        replaced: Int32Array = current[changed]
        if len(changed):
            current[changed] = pages[changed]
            self.num_synced[row] = min(self.num_synced[row], first + changed[0])
        return replaced

    def take_updates(self, rows: IndexArray) -> tuple[Int32Array, Int32Array, Int32Array]:
        """(rows, columns, pages) that the engine must set before it runs a step of `rows`.

        Only planned rows are brought up to date: an update for another row could meet,
        in one plan, the updates of that row's next owner. What a row's step is given, its next
        one is given again: should the first, still in flight, fail before it applies them,
        the next would write into pages of the row's former owner.
        """
        synced, ends = self.num_synced[rows], self.num_pages[rows]
        starts = np.minimum(synced, self._resend_from[rows])
        self._resend_from[rows] = synced
        self.num_synced[rows] = ends
        stale = (starts < ends).nonzero()[0]
        if not len(stale):
            return _NONE, _NONE, _NONE
        starts = starts[stale]
        counts = ends[stale] - starts
        page_rows = rows[stale].repeat(counts)
        before = counts.cumsum() - counts
        columns = np.arange(len(page_rows)) + (starts - before).repeat(counts)
        pages = self.pages[page_rows, columns]
        return page_rows.astype(np.int32), columns.astype(np.int32), pages
