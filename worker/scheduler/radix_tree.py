"""Prefix tree over page-aligned tokens: who shares which KV, and what goes first.

The tree owns the pages in it; it hands them back through `evict` and `clear` alone. It
knows nothing of requests: they hold locks. A lock on a node keeps the whole path to the
root. Cost follows the path and the pages touched, never the size of the tree.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.prefix_hashes import HASH_BYTES
from worker.step import Int32Array

# Enough for a summary of what was used last, and nothing to look through.
_MAX_RECENT = 1024


class Node:
    """An edge and its end: `pages` hold the KV of `token_ids`, after all of the parent's."""

    __slots__ = (
        "children",
        "hashes",
        "is_queued",
        "key",
        "last_used",
        "lock_count",
        "pages",
        "parent",
        "token_ids",
    )

    def __init__(
        self, parent: "Node | None", key: bytes, token_ids: Int32Array, pages: Int32Array
    ) -> None:
        self.parent = parent
        # Its name among the parent's children.
        self.key = key
        self.token_ids = token_ids
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.last_used = 0
        # Whether the eviction heap has an entry of it; it has one at most.
        self.is_queued = False
        # Of its pages, made by whoever tells of them; empty: not made yet.
        self.hashes = b""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a token sequence is in the tree; void once the tree changes."""

    # The deepest node that matches, with its first `num_node_pages` pages.
    node: Node
    num_node_pages: int
    pages: Int32Array
    # Of `pages`, those that nobody has locked.
    num_unlocked: int


class RadixTree:
    """Children are found by their first page of tokens, so edges part at page borders.

    Below the root that page is preceded by the salt: trees of different salts never meet.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        empty = np.empty(0, np.int32)
        self.root = Node(None, b"", empty, empty)
        self.num_nodes = 0
        self.num_pages = 0
        # In unlocked nodes. A node's lock covers its path, so all of them can be evicted.
        self.num_evictable = 0
        # (last_used, tie-break, node); an entry may be out of date, see `evict`.
        self._heap: list[tuple[int, int, Node]] = []
        self._ticks = 0
        # Where paths ended that were locked, the last one last. Some are there more than
        # once, some may be gone meanwhile: a bare log, because this is in every step.
        self._recent: deque[Node] = deque(maxlen=_MAX_RECENT)

    @property
    def ticks(self) -> int:
        """Another number whenever something has been used, added or dropped."""
        return self._ticks

    def recently_used(self) -> Iterator[Node]:
        """Nodes of the tree at which paths ended, the last used first; a bounded number.

        Some come more than once.
        """
        return (node for node in reversed(self._recent) if node.parent is not None)

    def match(self, token_ids: Int32Array, salt: str = "") -> PrefixMatch:
        """The longest prefix of whole pages. Changes nothing."""
        node, num_node_pages, num_unlocked = self.root, 0, 0
        found = [self.root.pages]
        position = 0
        while num_node_pages == len(node.pages):
            child = node.children.get(self._key(node, token_ids, position, salt))
            if child is None:
                break
            node = child
            num_node_pages = self._common_pages(child, token_ids[position:])
            found.append(child.pages[:num_node_pages])
            position += num_node_pages * self._page_size
            if not child.lock_count:
                num_unlocked += num_node_pages
        return PrefixMatch(node, num_node_pages, np.concatenate(found), num_unlocked)

    def lock(self, match: PrefixMatch) -> Node:
        """Keeps the matched pages until `unlock` of the node returned."""
        node = match.node
        if match.num_node_pages < len(node.pages):
            node = self._split(node, match.num_node_pages)
        self._lock_path(node, self.root)
        return node

    def unlock(self, node: Node) -> None:
        """Drops one lock; the path counts as used now."""
        self._ticks += 1
        leaf = node
        while node.parent is not None:
            node.lock_count -= 1
            node.last_used = self._ticks
            if not node.lock_count:
                self.num_evictable += len(node.pages)
            node = node.parent
        self._queue_if_evictable(leaf)

    def insert(
        self, node: Node, token_ids: Int32Array, pages: Int32Array, salt: str = ""
    ) -> tuple[Node, Int32Array]:
        """Adds KV of whole pages below a node the caller has locked, and moves the lock down.

        Where the tree has these tokens already it keeps its own pages. Returns the node now
        locked, and the tree's pages for the first tokens: those among the caller's that differ
        from them stay the caller's; all of the caller's after them belong to the tree.
        """
        top, position = node, 0
        canonical = [self.root.pages]
        while position < len(token_ids):
            child = node.children.get(self._key(node, token_ids, position, salt))
            if child is None:
                first_page = position // self._page_size
                node = self._add_leaf(node, token_ids[position:], pages[first_page:], salt)
                break
            shared = self._common_pages(child, token_ids[position:])
            node = child if shared == len(child.pages) else self._split(child, shared)
            canonical.append(node.pages)
            position += shared * self._page_size
        self._lock_path(node, top)
        return node, np.concatenate(canonical)

    def evict(self, count: int) -> Int32Array:
        """Gives up `count` pages, least recently used leaves first, each from its end."""
        assert count <= self.num_evictable, f"{count} wanted, {self.num_evictable} evictable"
        evicted = [self.root.pages]
        while count:
            last_used, _, node = heapq.heappop(self._heap)
            node.is_queued = False
            if node.last_used != last_used:
                # Used again since it was queued: to its new place, if it is still a leaf.
                self._queue_if_evictable(node)
                continue
            if node.lock_count or node.children or node.parent is None:
                continue
            keep = max(0, len(node.pages) - count)
            evicted.append(node.pages[keep:])
            count -= len(node.pages) - keep
            self._shrink(node, keep)
        return np.concatenate(evicted)

    def clear(self) -> Int32Array:
        """Gives up everything that is not locked."""
        self._ticks += 1
        dropped = [self.root.pages]
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            for child in list(node.children.values()):
                nodes.append(child)
                if not child.lock_count:
                    dropped.append(child.pages)
                    del node.children[child.key]
                    child.parent = None
                    self.num_nodes -= 1
        for _, _, node in self._heap:
            node.is_queued = False
        self._heap.clear()
        self.num_pages -= self.num_evictable
        self.num_evictable = 0
        return np.concatenate(dropped)

    def nodes(self) -> list[Node]:
        """Every node but the root, parents before children; for checks and tests."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found[1:]

    def _key(self, parent: Node, token_ids: Int32Array, position: int, salt: str) -> bytes:
        page = token_ids[position : position + self._page_size]
        if len(page) < self._page_size:
            return b""
        # Page keys are of one length, so what precedes one cannot be taken for a part of it.
        return (salt.encode() if parent is self.root else b"") + page.tobytes()

    def _common_pages(self, child: Node, token_ids: Int32Array) -> int:
        """How many of the child's pages match; the first one does, by its key."""
        if len(child.pages) == 1:
            return 1
        length = min(len(child.token_ids), len(token_ids))
        differs = child.token_ids[:length] != token_ids[:length]
        first = int(differs.argmax())
        return (first if differs[first] else length) // self._page_size

    def _add_leaf(self, parent: Node, token_ids: Int32Array, pages: Int32Array, salt: str) -> Node:
        key = self._key(parent, token_ids, 0, salt)
        # Copies: the caller's arrays are parts of tables that change.
        leaf = Node(parent, key, token_ids.copy(), pages.copy())
        parent.children[key] = leaf
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        return leaf

    def _split(self, node: Node, num_pages: int) -> Node:
        """Parts a node; returns the upper part. The lower one keeps its identity, and so
        the locks that requests hold on it."""
        assert node.parent is not None
        cut = num_pages * self._page_size
        head = Node(node.parent, node.key, node.token_ids[:cut].copy(), node.pages[:num_pages])
        head.lock_count, head.last_used = node.lock_count, node.last_used
        if node.hashes:
            bytes_before = num_pages * HASH_BYTES
            head.hashes, node.hashes = node.hashes[:bytes_before], node.hashes[bytes_before:]
        node.parent.children[head.key] = head
        node.token_ids, node.pages = node.token_ids[cut:].copy(), node.pages[num_pages:]
        node.parent, node.key = head, node.token_ids[: self._page_size].tobytes()
        head.children[node.key] = node
        self.num_nodes += 1
        return head

    def _lock_path(self, node: Node, top: Node) -> None:
        self._ticks += 1
        if node is not self.root:
            self._recent.append(node)
        while node is not top:
            if not node.lock_count:
                self.num_evictable -= len(node.pages)
            node.lock_count += 1
            node.last_used = self._ticks
            assert node.parent is not None
            node = node.parent

    def _shrink(self, leaf: Node, keep: int) -> None:
        self._ticks += 1
        dropped = len(leaf.pages) - keep
        self.num_pages -= dropped
        self.num_evictable -= dropped
        if keep:
            leaf.token_ids = leaf.token_ids[: keep * self._page_size].copy()
            leaf.pages = leaf.pages[:keep].copy()
            leaf.hashes = leaf.hashes[: keep * HASH_BYTES]
            self._queue_if_evictable(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        leaf.parent = None
        self.num_nodes -= 1
        self._queue_if_evictable(parent)

    def _queue_if_evictable(self, node: Node) -> None:
        if node.parent is None or node.lock_count or node.children or node.is_queued:
            return
        node.is_queued = True
        self._ticks += 1
        heapq.heappush(self._heap, (node.last_used, self._ticks, node))
