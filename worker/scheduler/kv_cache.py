"""Whose pages are whose: match, admit, grow, share, release.

Every page is in exactly one place: free, in the radix tree, private to one row, or retired
(no row's any more, but perhaps read by a step in flight). A row's private pages come after
the shared ones, which it keeps by a lock in the tree.
"""

from collections import deque

from worker.scheduler.page_pool import PagePool
from worker.scheduler.page_table import PageTable
from worker.scheduler.radix_tree import Node, PrefixMatch, RadixTree
from worker.step import EngineInfo, IndexArray, Int32Array


class KVCacheManager:
    """Pages of each row. Counts are in pages unless a name says tokens."""

    def __init__(self, info: EngineInfo, *, prefix_caching: bool) -> None:
        self._page_size = info.page_size
        self._page_shift = info.page_size.bit_length() - 1
        self._prefix_caching = prefix_caching
        self._pool = PagePool(info.num_pages)
        self._tree = RadixTree(info.page_size)
        self.table = PageTable(info.max_rows, self.pages_for(info.max_context))
        # The node each row has locked; the root, which needs no lock, stands for none.
        self._nodes: list[Node] = [self._tree.root] * info.max_rows
        # (step, pages): free once that step is over.
        self._retired: deque[tuple[int, Int32Array]] = deque()

    @property
    def pool(self) -> PagePool:
        return self._pool

    @property
    def tree(self) -> RadixTree:
        return self._tree

    @property
    def num_available(self) -> int:
        """Pages that a row could get now: free ones, and cached ones that nobody holds."""
        return self._pool.num_free + self._tree.num_evictable

    @property
    def num_retired(self) -> int:
        return sum(len(pages) for _, pages in self._retired)

    @property
    def retired_pages(self) -> list[Int32Array]:
        return [pages for _, pages in self._retired]

    def node_of(self, row: int) -> Node:
        return self._nodes[row]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def match(
        self, token_ids: Int32Array, salt: str, *, needs_all_logits: bool = False
    ) -> PrefixMatch:
        """What is cached of a prompt; never all of it, for a step must compute something.

        With `needs_all_logits` nothing is: the cache has none of them.
        """
        is_usable = self._prefix_caching and not needs_all_logits
        usable = token_ids[:-1] if is_usable else token_ids[:0]
        return self._tree.match(usable, salt)

    def admit(self, match: PrefixMatch, num_tokens: int) -> int:
        """A row with the matched pages and new ones for the rest of `num_tokens`."""
        row = self.table.acquire_row()
        # Locked before anything is evicted to make room for the rest.
        self._nodes[row] = self._tree.lock(match)
        self.table.append(row, match.pages)
        self.table.num_shared[row] = len(match.pages)
        self.table.append(row, self._take(self.pages_for(num_tokens) - len(match.pages)))
        return row

    def needs_page(self, rows: IndexArray, positions: Int32Array) -> IndexArray:
        """Those of the rows that have no page yet for the KV of their position."""
        columns = positions >> self._page_shift
        lacking: IndexArray = rows[columns >= self.table.num_pages[rows]]
        return lacking

    def grow(self, rows: IndexArray) -> None:
        """One more page for each of the rows."""
        if len(rows):
            self.table.append_one_each(rows, self._take(len(rows)))

    def share(self, row: int, token_ids: Int32Array, salt: str, reading_step: int | None) -> None:
        """Puts the row's KV of `token_ids`, whole pages of it, in the tree.

        Where the tree has the same tokens already, the row goes over to the tree's pages with
        its next plan; its own are free once `reading_step`, the last launched step that may
        read them, is over.
        """
        if not self._prefix_caching:
            return
        first = int(self.table.num_shared[row])
        end = len(token_ids) // self._page_size
        if end <= first:
            return
        self._nodes[row], canonical = self._tree.insert(
            self._nodes[row],
            token_ids[first * self._page_size : end * self._page_size],
            self.table.pages[row, first:end],
            salt,
        )
        self.table.num_shared[row] = end
        if not len(canonical):
            return
        replaced = self.table.replace(row, first, canonical)
        if reading_step is None:
            self._pool.give(replaced)
        elif len(replaced):
            self._retired.append((reading_step, replaced))

    def release(self, row: int) -> None:
        """Gives back all that the row holds; no step in flight may use it."""
        private = self.table.pages[row, self.table.num_shared[row] : self.table.num_pages[row]]
        self._pool.give(private)
        self._tree.unlock(self._nodes[row])
        self._nodes[row] = self._tree.root
        self.table.release_row(row)

    def step_over(self, step_id: int) -> None:
        """No step up to this one runs any more."""
        while self._retired and self._retired[0][0] <= step_id:
            self._pool.give(self._retired.popleft()[1])

    def reclaimable(self, row: int) -> int:
        """Pages that would become available if this row alone were released."""
        count = int(self.table.num_pages[row] - self.table.num_shared[row])
        node = self._nodes[row]
        while node.parent is not None and node.lock_count == 1:
            count += len(node.pages)
            node = node.parent
        return count

    def flush(self) -> int:
        """Empties the tree but for what rows hold; returns how many pages that freed."""
        pages = self._tree.clear()
        self._pool.give(pages)
        return len(pages)

    def _take(self, count: int) -> Int32Array:
        missing = count - self._pool.num_free
        if missing > 0:
            self._pool.give(self._tree.evict(missing))
        return self._pool.take(count)
