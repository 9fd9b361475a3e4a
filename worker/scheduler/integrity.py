"""Proves that every page and every row is in exactly one place."""

import numpy as np

from worker.scheduler.lifecycle import Lifecycle
from worker.scheduler.radix_tree import Node
from worker.scheduler.request import RequestState
from worker.scheduler.rows import Phase


class IntegrityError(Exception):
    """The scheduler's own books contradict each other: a fault in the scheduler."""


def check_all(lifecycle: Lifecycle) -> None:
    """Raises IntegrityError. Walks the whole tree, so it is not for every step in production."""
    used_rows = [row for row, request in enumerate(lifecycle.rows.requests) if request]
    _check_rows(lifecycle, used_rows)
    _check_pages(lifecycle, used_rows)
    _check_tree(lifecycle, used_rows)


def check_idle(lifecycle: Lifecycle) -> None:
    """Raises IntegrityError if anything is held although nothing lives. Costs nothing."""
    kv = lifecycle.kv
    _require(not lifecycle.live, "a request is live")
    _require(kv.table.num_free_rows == len(lifecycle.rows.requests), "a row is held")
    _require(not lifecycle.rows.features.num_open, "a feature is open")
    _require(not kv.num_retired, "pages are retired for ever")
    _require(kv.tree.num_evictable == kv.tree.num_pages, "cached pages are locked")
    held = kv.pool.num_pages - kv.pool.num_free - kv.tree.num_pages
    _require(not held, f"{held} pages are held")


def _check_rows(lifecycle: Lifecycle, used_rows: list[int]) -> None:
    rows, free = lifecycle.rows, lifecycle.kv.table.free_rows
    _require(sorted(used_rows + free) == list(range(len(rows.requests))), "rows leaked")
    for row in used_rows:
        request = rows.request_of(row)
        _require(request.row == row, f"row {row} and its request disagree")
        _require(request.state is not RequestState.WAITING, f"a waiting request has row {row}")
        expected = {
            Phase.PREFILL: RequestState.RUNNING,
            Phase.DECODE: RequestState.RUNNING,
            Phase.PREEMPTED: RequestState.PREEMPTED,
            Phase.ENDED: RequestState.ENDED,
        }[Phase(rows.phase[row])]
        _require(request.state is expected, f"row {row}: {request.state}, {rows.phase[row]}")
        is_leaving = expected is not RequestState.RUNNING
        _require(not is_leaving or rows.is_in_flight(row), f"row {row} was not released")
        valid, computed = rows.valid_lens[row], rows.computed_lens[row]
        known, planned, end = rows.known_lens[row], rows.lens[row], rows.end_lens[row]
        _require(valid <= computed <= planned, f"row {row}: {valid}, {computed}, {planned}")
        _require(known <= planned <= end, f"row {row}: {known}, {planned}, {end}")
    _require(not rows.phase[free].any(), "a free row has a phase")
    _require(not any(map(rows.is_in_flight, free)), "a free row is in flight")
    num_waiting = sum(r.state is RequestState.WAITING for r in lifecycle.live.values())
    _require(num_waiting == len(lifecycle.waiting), "the queue's length is wrong")


def _check_pages(lifecycle: Lifecycle, used_rows: list[int]) -> None:
    kv = lifecycle.kv
    table = kv.table
    places = [kv.pool.free_pages, *kv.retired_pages]
    places += [node.pages for node in kv.tree.nodes()]
    places += [table.pages[r, table.num_shared[r] : table.num_pages[r]] for r in used_rows]
    counts = np.bincount(np.concatenate(places), minlength=kv.pool.num_pages)
    _require(len(counts) == kv.pool.num_pages, "a page id is out of range")
    _require(not (counts > 1).any(), f"pages in two places: {np.flatnonzero(counts > 1)}")
    _require(bool(counts.all()), f"pages leaked: {np.flatnonzero(counts == 0)}")
    for row in used_rows:
        path = [node.pages for node in reversed(_path(kv.node_of(row)))]
        held = np.concatenate([np.empty(0, np.int32), *path])
        shared = table.pages[row, : table.num_shared[row]]
        _require(np.array_equal(held, shared), f"row {row} uses pages it has not locked")


def _check_tree(lifecycle: Lifecycle, used_rows: list[int]) -> None:
    tree = lifecycle.kv.tree
    locks: dict[int, int] = {}
    for row in used_rows:
        for node in _path(lifecycle.kv.node_of(row)):
            locks[id(node)] = locks.get(id(node), 0) + 1
    nodes = tree.nodes()
    for node in nodes:
        _require(node.lock_count == locks.get(id(node), 0), "a lock count is wrong")
        _require(len(node.pages) > 0, "a node is empty")
    _require(len(nodes) == tree.num_nodes, "the tree's node count is wrong")
    _require(sum(len(n.pages) for n in nodes) == tree.num_pages, "the tree's page count is wrong")
    evictable = sum(len(n.pages) for n in nodes if not n.lock_count)
    _require(evictable == tree.num_evictable, "the tree's evictable count is wrong")


def _path(node: Node) -> list[Node]:
    """From the node up to the root, which is left out."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _require(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
