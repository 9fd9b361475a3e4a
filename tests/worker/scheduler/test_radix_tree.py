"""The prefix tree alone: what it finds, what it keeps, what it gives up first."""

import numpy as np
import pytest

from worker.scheduler.radix_tree import Node, RadixTree
from worker.step import Int32Array

PAGE_SIZE = 4


def tokens(*pages: int) -> Int32Array:
    """A page of equal tokens for each number."""
    return np.repeat(np.array(pages, np.int32), PAGE_SIZE)


def page_ids(*ids: int) -> Int32Array:
    return np.array(ids, np.int32)


def put(tree: RadixTree, token_ids: Int32Array, pages: Int32Array, salt: str = "") -> list[int]:
    """Inserts from the root and unlocks; returns the tree's own pages for what it had."""
    node, canonical = tree.insert(tree.root, token_ids, pages, salt)
    tree.unlock(node)
    return [int(page) for page in canonical]


def hold(tree: RadixTree, token_ids: Int32Array, salt: str = "") -> Node:
    return tree.lock(tree.match(token_ids, salt))


def found(tree: RadixTree, token_ids: Int32Array, salt: str = "") -> list[int]:
    return [int(page) for page in tree.match(token_ids, salt).pages]


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(PAGE_SIZE)


def test_match_finds_the_longest_prefix_of_whole_pages(tree: RadixTree) -> None:
    put(tree, tokens(1, 2, 3), page_ids(10, 11, 12))
    assert found(tree, tokens(1, 2, 3, 4)) == [10, 11, 12]
    assert found(tree, tokens(1, 2, 9)) == [10, 11]
    assert found(tree, tokens(1, 2, 3)[:-1]) == [10, 11]
    assert found(tree, tokens(1)[:-1]) == []
    assert found(tree, tokens(9)) == []


def test_match_changes_nothing(tree: RadixTree) -> None:
    put(tree, tokens(1, 2, 3), page_ids(10, 11, 12))
    tree.match(tokens(1, 2))
    assert tree.num_nodes == 1
    assert tree.num_evictable == 3


def test_sequences_that_part_inside_a_page_share_only_whole_pages(tree: RadixTree) -> None:
    put(tree, tokens(1, 2), page_ids(10, 11))
    other = tokens(1, 2)
    other[-1] = 7
    assert put(tree, other, page_ids(20, 21)) == [10]
    assert found(tree, other) == [10, 21]
    assert found(tree, tokens(1, 2)) == [10, 11]


def test_insert_keeps_the_pages_that_the_tree_has(tree: RadixTree) -> None:
    put(tree, tokens(1, 2), page_ids(10, 11))
    assert put(tree, tokens(1, 2, 3), page_ids(20, 21, 22)) == [10, 11]
    assert found(tree, tokens(1, 2, 3)) == [10, 11, 22]
    assert tree.num_pages == 3


def test_insert_below_a_held_node_moves_the_lock_down(tree: RadixTree) -> None:
    put(tree, tokens(1, 2), page_ids(10, 11))
    node = hold(tree, tokens(1))
    node, _ = tree.insert(node, tokens(5), page_ids(15))
    assert found(tree, tokens(1, 5)) == [10, 15]
    assert tree.num_evictable == 1
    tree.unlock(node)
    assert tree.num_evictable == tree.num_pages == 3


def test_salts_never_share(tree: RadixTree) -> None:
    put(tree, tokens(1, 2), page_ids(10, 11), "a")
    assert found(tree, tokens(1, 2), "b") == []
    assert found(tree, tokens(1, 2)) == []
    assert put(tree, tokens(1, 2), page_ids(20, 21), "b") == []
    assert found(tree, tokens(1, 2), "a") == [10, 11]
    assert found(tree, tokens(1, 2), "b") == [20, 21]


def test_a_held_path_is_never_evicted(tree: RadixTree) -> None:
    put(tree, tokens(1, 2, 3), page_ids(10, 11, 12))
    node = hold(tree, tokens(1, 2))
    assert tree.num_evictable == 1
    assert tree.evict(1).tolist() == [12]
    with pytest.raises(AssertionError):
        tree.evict(1)
    assert found(tree, tokens(1, 2)) == [10, 11]
    tree.unlock(node)
    assert sorted(tree.evict(2).tolist()) == [10, 11]
    assert tree.num_nodes == tree.num_pages == 0


def test_splitting_a_held_node_keeps_every_holder(tree: RadixTree) -> None:
    put(tree, tokens(1, 2, 3), page_ids(10, 11, 12))
    deep = hold(tree, tokens(1, 2, 3))
    shallow = hold(tree, tokens(1))
    tree.unlock(deep)
    assert tree.num_evictable == 2
    tree.unlock(shallow)
    assert tree.num_evictable == 3


def test_two_holders_must_both_let_go(tree: RadixTree) -> None:
    put(tree, tokens(1), page_ids(10))
    first, second = hold(tree, tokens(1)), hold(tree, tokens(1))
    tree.unlock(first)
    assert tree.num_evictable == 0
    tree.unlock(second)
    assert tree.num_evictable == 1


def test_the_least_recently_used_leaf_goes_first(tree: RadixTree) -> None:
    for i in range(4):
        put(tree, tokens(i), page_ids(10 + i))
    tree.unlock(hold(tree, tokens(0)))
    tree.unlock(hold(tree, tokens(2)))
    assert [tree.evict(1).tolist() for _ in range(4)] == [[11], [13], [10], [12]]


def test_leaves_go_before_what_they_hang_on_and_from_their_end(tree: RadixTree) -> None:
    put(tree, tokens(1, 2), page_ids(10, 11))
    put(tree, tokens(1, 2, 3, 4), page_ids(0, 0, 12, 13))
    assert [tree.evict(1).tolist() for _ in range(4)] == [[13], [12], [11], [10]]


def test_a_parent_becomes_evictable_in_its_own_place(tree: RadixTree) -> None:
    put(tree, tokens(1, 2), page_ids(10, 11))
    put(tree, tokens(7), page_ids(17))
    tree.unlock(hold(tree, tokens(1)))
    # The use of page 10 came last, so what hangs on it goes first and it goes after page 17.
    assert [tree.evict(1).tolist() for _ in range(3)] == [[11], [17], [10]]


def test_clear_leaves_what_is_held(tree: RadixTree) -> None:
    put(tree, tokens(1, 2, 3), page_ids(10, 11, 12))
    put(tree, tokens(5), page_ids(15))
    node = hold(tree, tokens(1))
    assert sorted(tree.clear().tolist()) == [11, 12, 15]
    assert found(tree, tokens(1, 2, 3)) == [10]
    tree.unlock(node)
    assert tree.evict(1).tolist() == [10]


def test_it_agrees_with_a_dictionary_of_prefixes() -> None:
    rng = np.random.default_rng(0)
    tree = RadixTree(2)
    owner: dict[tuple[int, ...], int] = {}
    held: list[Node] = []
    next_page = 0
    for _ in range(2000):
        pages = int(rng.integers(1, 6))
        token_ids = rng.integers(0, 2, 2 * pages).astype(np.int32)
        prefixes = [tuple(token_ids[: 2 * (i + 1)].tolist()) for i in range(pages)]
        expected = []
        for prefix in prefixes:
            if prefix not in owner:
                break
            expected.append(owner[prefix])
        assert found(tree, token_ids) == expected
        action = rng.random()
        if action < 0.4:
            fresh = np.arange(next_page, next_page + pages, dtype=np.int32)
            next_page += pages
            node, canonical = tree.insert(tree.root, token_ids, fresh)
            assert canonical.tolist() == expected
            for prefix, page in zip(prefixes, fresh.tolist(), strict=True):
                owner.setdefault(prefix, page)
            held.append(node)
        elif action < 0.7 and held:
            tree.unlock(held.pop(int(rng.integers(len(held)))))
        elif tree.num_evictable:
            gone = set(tree.evict(int(rng.integers(1, tree.num_evictable + 1))).tolist())
            owner = {prefix: page for prefix, page in owner.items() if page not in gone}
        assert len(owner) == tree.num_pages
