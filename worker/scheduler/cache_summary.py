"""What gateways are told of the radix tree: a bounded sample of the prefixes used last.

Made at a low rate beside the steps, never in one: the tree only notes which nodes were used,
and each page is hashed once, when it is first told of.
"""

from shared.prefix_hashes import (
    FINGERPRINT_BYTES,
    HASH_BYTES,
    between,
    milestones,
    page_hashes,
    root_hash,
)
from worker.scheduler.radix_tree import Node, RadixTree

# 8 KB in all: a hundred prompts of a thousand tokens that share nothing, at 16 to a page.
MAX_TOLD = 2048
# About 2 ms; the rest is told the next time.
_MAX_HASHED_PAGES = 2048
_TOKEN_BYTES = 4


class CacheSummary:
    """Tells of one tree."""

    def __init__(self, tree: RadixTree, page_size: int, max_context: int) -> None:
        self._tree = tree
        self._page_bytes = _TOKEN_BYTES * page_size
        self._milestones = milestones(max_context // page_size)
        self._seen_ticks = -1
        self._told = b""
        self._pages_left = 0

    def take(self) -> bytes | None:
        """The fingerprints of now, those used last first; None if they are as before."""
        if self._tree.ticks == self._seen_ticks:
            return None
        self._seen_ticks = self._tree.ticks
        self._pages_left = _MAX_HASHED_PAGES
        encoded = b"".join(self._collect())
        if encoded == self._told:
            return None
        self._told = encoded
        return encoded

    def _collect(self) -> list[bytes]:
        """Fingerprints as they go on the wire."""
        told: dict[bytes, None] = {}
        # Depth in pages at the end of each node that is done.
        depths: dict[Node, int] = {self._tree.root: 0}
        for leaf in self._tree.recently_used():
            path = []
            node = leaf
            while node not in depths:
                path.append(node)
                assert node.parent is not None
                node = node.parent
            for node in reversed(path):
                if not self._hash(node):
                    # Again next time, even if nothing else happens until then.
                    self._seen_ticks = -1
                    return list(told)
                assert node.parent is not None
                start = depths[node.parent]
                depths[node] = end = start + len(node.pages)
                for depth in (*between(self._milestones, start, end - 1), end):
                    first = (depth - start - 1) * HASH_BYTES
                    told[node.hashes[first : first + FINGERPRINT_BYTES]] = None
                if len(told) >= MAX_TOLD:
                    return list(told)[:MAX_TOLD]
        return list(told)

    def _hash(self, node: Node) -> bool:
        """Makes the hashes of a node whose parent has its own. False: not any more now."""
        if node.hashes:
            return True
        if self._pages_left < 0:
            return False
        self._pages_left -= len(node.pages)
        parent = node.parent
        assert parent is not None
        if parent is self._tree.root:
            salt = node.key[: len(node.key) - self._page_bytes].decode()
            before = root_hash(salt)
        else:
            before = parent.hashes[-HASH_BYTES:]
        hashes = page_hashes(before, node.token_ids.tobytes(), self._page_bytes)
        node.hashes = b"".join(hashes)
        return True
