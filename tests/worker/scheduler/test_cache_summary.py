"""What a worker tells of its prefix cache, and that it is so."""

import random
from array import array
from collections.abc import Iterable

import pytest

from shared.prefix_hashes import fingerprint, milestones, page_hashes, root_hash
from tests.worker.scheduler.driver import Driver, engine_info
from worker.scheduler.cache_summary import MAX_TOLD
from worker.scheduler.config import SchedulerConfig

PAGE_SIZE = 4


def driver(num_pages: int = 256, max_context: int = 256) -> Driver:
    info = engine_info(num_pages=num_pages, page_size=PAGE_SIZE, max_context=max_context)
    return Driver(info=info, eos=())


def of(prompt: Iterable[int], salt: str = "") -> list[int]:
    """Of each whole page of a prompt."""
    token_bytes = array("i", prompt).tobytes()
    return [fingerprint(h) for h in page_hashes(root_hash(salt), token_bytes, 4 * PAGE_SIZE)]


def told(subject: Driver) -> set[int]:
    encoded = subject.scheduler.cached_prefixes()
    assert encoded is not None, "nothing has changed"
    return set(memoryview(encoded).cast("I"))


def test_a_cached_prompt_is_told_to_its_last_whole_page() -> None:
    subject = driver()
    prompt = list(range(1, 43))
    subject.complete(prompt, max_tokens=1)
    assert told(subject) == {of(prompt)[n - 1] for n in (1, 2, 3, 4, 5, 6, 7, 8, 10)}


def test_what_two_prompts_share_is_told_exactly_once_they_have_parted() -> None:
    subject = driver()
    shared = [5] * 36
    subject.complete([*shared, *range(10, 30)])
    assert of(shared)[8] not in told(subject)
    subject.complete([*shared, *range(40, 60)])
    assert of(shared)[8] in told(subject)


def test_nothing_is_told_twice() -> None:
    subject = driver()
    assert subject.scheduler.cached_prefixes() is None
    subject.complete([1] * 20)
    assert told(subject)
    assert subject.scheduler.cached_prefixes() is None
    # Used again, but no other than before.
    subject.complete([1] * 20)
    assert subject.scheduler.cached_prefixes() is None


def test_salted_prompts_are_told_under_their_salt_alone() -> None:
    subject = driver()
    prompt = list(range(1, 21))
    uid = subject.submit(prompt, 1, cache_salt="käse")
    subject.run()
    assert subject.outcomes[uid].finished
    assert told(subject) == set(of(prompt, "käse"))
    assert not set(of(prompt)) & set(of(prompt, "käse"))


def test_what_is_evicted_or_flushed_is_told_no_more() -> None:
    subject = driver(num_pages=16, max_context=64)
    first, second = [1] * 40, [2] * 56
    subject.complete(first)
    assert of(first)[9] in told(subject)
    subject.complete(second, max_tokens=1)
    assert of(first)[9] not in told(subject)
    subject.scheduler.flush_cache()
    assert told(subject) == set()


def test_without_prefix_caching_nothing_is_ever_told() -> None:
    subject = Driver(config=SchedulerConfig(prefix_caching=False))
    subject.complete([1] * 20)
    assert subject.scheduler.cached_prefixes() is None


def test_only_so_much_is_told_and_that_is_what_was_used_last() -> None:
    subject = driver(num_pages=20_000)
    rng = random.Random(3)
    prompts = [[rng.randint(1, 50) for _ in range(200)] for _ in range(200)]
    for prompt in prompts:
        subject.submit(prompt, 1)
    subject.run()
    # A page is hashed once, and so many at a time.
    for _ in range(20):
        encoded = subject.scheduler.cached_prefixes()
        if encoded is None:
            break
        all_told = set(memoryview(encoded).cast("I"))
    assert len(all_told) == MAX_TOLD
    assert {of(prompt)[49] for prompt in prompts[-60:]} <= all_told
    assert of(prompts[0])[49] not in all_told


@pytest.mark.parametrize("seed", range(5))
def test_all_that_is_told_after_random_traffic_is_in_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    subject = driver(num_pages=64, max_context=64)
    everything: dict[int, tuple[list[int], str]] = {}
    for _ in range(150):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 6))] * rng.randint(1, 8)
        salt = rng.choice(("", "", "a"))
        for number, name in enumerate(of(prompt, salt), 1):
            everything[name] = (prompt[: number * PAGE_SIZE], salt)
        subject.submit(prompt, rng.randint(1, 8), cache_salt=salt)
        subject.turns(rng.randint(1, 4))
        encoded = subject.scheduler.cached_prefixes()
    subject.run()
    encoded = subject.scheduler.cached_prefixes() or encoded
    assert encoded
    for name in memoryview(encoded).cast("I"):
        prompt, salt = everything[name]
        # One more, since of a whole prompt something is computed anew.
        uid = subject.submit([*prompt, 3], 1, cache_salt=salt)
        subject.run()
        finished = subject.outcomes[uid].finished
        assert finished.cached_tokens == len(prompt)
        break


def test_milestones_are_a_quarter_apart_at_most() -> None:
    lengths = milestones(300)
    assert lengths[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert lengths[-1] == 256
    assert all(b <= 1.25 * a for a, b in zip(lengths[3:], lengths[4:], strict=False))
