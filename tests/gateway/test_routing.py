"""Which worker is chosen, and what that does for cache hits and balance."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gateway.affinity import PrefixMemory, PromptPrefix
from gateway.routing import Chooser, Reason, RoutingPolicy
from shared.prefix_hashes import FINGERPRINT_BYTES

PAGE_SIZE = 16


@dataclass(eq=False)
class Worker:
    """A worker as choosing sees it, with a prefix cache that counts its hits."""

    address: str
    page_size: int = PAGE_SIZE
    capacity: int = 64
    num_outstanding: int = 0
    is_full: bool = False
    suspect: bool = False
    max_pages: int = 4000
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    peak: int = 0
    num_served: int = 0

    def is_suspect(self, now: float) -> bool:
        return self.suspect

    def serve(self, prompt: Sequence[int]) -> int:
        """Caches the prompt; returns how many of its tokens were cached before."""
        self.num_served += 1
        names = PromptPrefix([*prompt, 0]).names(self.page_size)
        hits = 0
        while hits < len(names) and names[hits] in self.cache:
            hits += 1
        for name in names:
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.max_pages:
            self.cache.popitem(last=False)
        return hits * self.page_size

    def told(self) -> bytes:
        """What it would publish now."""
        newest = list(self.cache)[-2048:]
        return b"".join(name.to_bytes(FINGERPRINT_BYTES, "little") for name in newest)


def workers(count: int) -> list[Worker]:
    return [Worker(f"10.0.0.{number}:50052") for number in range(count)]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(count)]


def choose(
    candidates: list[Worker], prompt: Sequence[int], policy: RoutingPolicy = RoutingPolicy.PREFIX
) -> Worker:
    return Chooser(policy, rng=random.Random(0)).choose(candidates, PromptPrefix(prompt), 0.0)[0]


def test_the_worker_that_was_sent_the_longest_part_of_the_prompt_gets_it() -> None:
    some = workers(4)
    prompt = tokens(random.Random(1), 400)
    some[1].prefixes.send(PromptPrefix(prompt[:100]), PAGE_SIZE)
    some[2].prefixes.send(PromptPrefix(prompt[:300]), PAGE_SIZE)
    assert choose(some, prompt) is some[2]


def test_what_a_worker_tells_counts_as_what_it_was_sent() -> None:
    some = workers(4)
    prompt = tokens(random.Random(1), 400)
    some[3].serve(prompt)
    some[3].prefixes.tell(some[3].told())
    assert choose(some, prompt) is some[3]
    some[3].prefixes.tell(b"")
    assert some[3].prefixes.matched_tokens(PromptPrefix(prompt), PAGE_SIZE) == 0


def test_workers_with_pages_of_other_sizes_are_each_asked_in_their_own() -> None:
    some = [Worker("a", page_size=16), Worker("b", page_size=64)]
    prompt = tokens(random.Random(1), 200)
    for one in some:
        one.serve(prompt)
        one.prefixes.tell(one.told())
    matched = [one.prefixes.matched_tokens(PromptPrefix(prompt), one.page_size) for one in some]
    assert matched == [192, 192]
    some[0].prefixes.forget()
    assert choose(some, prompt) is some[1]


def test_load_outweighs_a_short_match_and_not_a_long_one() -> None:
    some = workers(2)
    prompt = tokens(random.Random(1), 2000)
    some[0].prefixes.send(PromptPrefix(prompt), PAGE_SIZE)
    some[0].num_outstanding = 4
    assert choose(some, prompt) is some[0]
    assert choose(some, prompt[:50]) is some[1]


def test_no_match_is_worth_more_than_the_bound_of_a_workers_share() -> None:
    some = workers(2)
    prompt = tokens(random.Random(1), 8000)
    some[0].prefixes.send(PromptPrefix(prompt), PAGE_SIZE)
    some[0].num_outstanding = 40
    assert choose(some, prompt) is some[1]


def test_what_decided_is_told() -> None:
    some = workers(2)
    known, new = PromptPrefix(range(400)), PromptPrefix(range(1000, 1400))
    some[0].prefixes.send(known, PAGE_SIZE)

    def reason(
        prompt: PromptPrefix, policy: RoutingPolicy = RoutingPolicy.PREFIX, *, of: int = 2
    ) -> Reason:
        return Chooser(policy).choose(some[:of], prompt, 0.0)[1]

    assert reason(known) is Reason.PREFIX
    assert reason(new) is Reason.HASH
    assert reason(PromptPrefix(range(4))) is Reason.LOAD
    assert reason(known, of=1) is Reason.ONLY
    assert reason(known, RoutingPolicy.LEAST_LOADED) is Reason.LOAD
    some[0].num_outstanding = 4
    assert reason(PromptPrefix(range(50))) is Reason.LOAD


def test_a_larger_worker_may_have_more() -> None:
    some = workers(2)
    some[0].capacity = 256
    some[0].num_outstanding, some[1].num_outstanding = 40, 20
    assert choose(some, tokens(random.Random(1), 4), RoutingPolicy.LEAST_LOADED) is some[0]


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_full_and_suspect_workers_are_passed_over_while_there_are_others(
    policy: RoutingPolicy,
) -> None:
    some = workers(3)
    prompt = tokens(random.Random(1), 400)
    some[0].is_full = some[1].suspect = True
    for one in some[:2]:
        one.prefixes.send(PromptPrefix(prompt), PAGE_SIZE)
    some[2].num_outstanding = 50
    assert choose(some, prompt, policy) is some[2]
    some[2].is_full = some[2].suspect = True
    assert choose(some, prompt, policy) is some[0]


def test_of_two_at_random_the_less_loaded_is_taken() -> None:
    some = workers(4)
    some[0].num_outstanding = 10
    chooser = Chooser(RoutingPolicy.POWER_OF_TWO, rng=random.Random(5))
    chosen = Counter(chooser.choose(some, None, 0.0)[0].address for _ in range(3000))
    assert some[0].address not in chosen
    assert len(chosen) == 3
    assert min(chosen.values()) > 800


def test_prompts_that_nobody_has_go_where_every_gateway_would_send_them() -> None:
    rng = random.Random(2)
    prompts = [tokens(rng, 100) for _ in range(200)]
    here = [choose(workers(4), prompt).address for prompt in prompts]
    there = [choose(workers(4)[::-1], prompt).address for prompt in prompts]
    assert here == there
    assert min(Counter(here).values()) > 25
    # When one goes, its prompts alone move.
    left = [choose(workers(3), prompt).address for prompt in prompts]
    moved = [a for a, b in zip(here, left, strict=True) if a != b]
    assert set(moved) == {"10.0.0.3:50052"}


def test_prompts_too_short_to_be_cached_take_turns() -> None:
    some = workers(3)
    chooser = Chooser()
    chosen = [chooser.choose(some, PromptPrefix([1, 2, 3]), 0.0)[0].address for _ in range(9)]
    assert sorted(Counter(chosen).values()) == [3, 3, 3]


def test_prompts_of_another_salt_are_not_taken_for_the_same() -> None:
    memory = PrefixMemory()
    prompt = tokens(random.Random(1), 100)
    memory.send(PromptPrefix(prompt, "a"), PAGE_SIZE)
    assert memory.matched_tokens(PromptPrefix(prompt, "a"), PAGE_SIZE) == 96
    assert memory.matched_tokens(PromptPrefix(prompt, "b"), PAGE_SIZE) == 0
    assert memory.matched_tokens(PromptPrefix(prompt), PAGE_SIZE) == 0


def test_a_memory_keeps_what_was_sent_last() -> None:
    memory = PrefixMemory(max_sent=100)
    rng = random.Random(1)
    prompts = [tokens(rng, 100) for _ in range(50)]
    for prompt in prompts:
        memory.send(PromptPrefix(prompt), PAGE_SIZE)
    assert memory.matched_tokens(PromptPrefix(prompts[-1]), PAGE_SIZE) == 96
    assert memory.matched_tokens(PromptPrefix(prompts[0]), PAGE_SIZE) == 0


def test_a_memory_keeps_a_bounded_part_of_what_it_is_told() -> None:
    memory = PrefixMemory(max_told=3)
    rng = random.Random(1)
    prompts = [PromptPrefix(tokens(rng, 17)) for _ in range(5)]
    names = [prompt.names(PAGE_SIZE)[0] for prompt in prompts]
    memory.tell(b"".join(name.to_bytes(FINGERPRINT_BYTES, "little") for name in names))
    matched = [memory.matched_tokens(prompt, PAGE_SIZE) for prompt in prompts]
    assert matched == [16, 16, 16, 0, 0]


@dataclass(frozen=True, slots=True)
class Result:
    hit_rate: float
    # Most that a worker had at once, against the mean of their peaks; and of all requests.
    peak_to_mean: float
    served_to_mean: float


class Simulation:
    """Gateways and workers without time: each turn some requests begin, and some end.

    What a worker tells reaches the gateways every 40 requests. Each gateway has its own
    memory of what it sent, and all see the true load.
    """

    def __init__(self, policy: Callable[[], Chooser] | None, num_gateways: int = 2) -> None:
        self.rng = random.Random(11)
        self.workers = workers(4)
        # Each gateway sees the same workers with a memory of its own.
        self.views = [[Seen(one) for one in self.workers] for _ in range(num_gateways)]
        self.choosers = [policy() for _ in range(num_gateways)] if policy else None
        self.ending: list[tuple[int, Worker]] = []
        self.turn = 0
        self.hits = self.asked = 0

    def request(self, prompt: list[int]) -> None:
        self.turn += 1
        while self.ending and self.ending[0][0] <= self.turn:
            self.ending.pop(0)[1].num_outstanding -= 1
        gateway = self.rng.randrange(len(self.views))
        if self.choosers is None:
            chosen = self.rng.choice(self.views[gateway])
        else:
            prefix = PromptPrefix(prompt)
            chosen, _ = self.choosers[gateway].choose(self.views[gateway], prefix, 0.0)
            chosen.prefixes.send(prefix, PAGE_SIZE)
        worker = chosen.worker
        self.hits += worker.serve(prompt[:-1])
        self.asked += len(prompt)
        worker.num_outstanding += 1
        worker.peak = max(worker.peak, worker.num_outstanding)
        self.ending.append((self.turn + 60, worker))
        if self.turn % 40 == 0:
            for view in self.views:
                for seen in view:
                    seen.prefixes.tell(seen.worker.told())

    def result(self) -> Result:
        peaks = [one.peak for one in self.workers]
        served = [one.num_served for one in self.workers]
        mean = sum(peaks) / len(peaks)
        return Result(
            self.hits / self.asked, max(peaks) / mean, max(served) / (sum(served) / len(served))
        )


class Seen:
    """A worker as one gateway sees it."""

    is_full = False
    page_size = PAGE_SIZE

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.address = worker.address
        self.capacity = worker.capacity
        self.prefixes = PrefixMemory()

    @property
    def num_outstanding(self) -> int:
        return self.worker.num_outstanding

    def is_suspect(self, now: float) -> bool:
        return False


def conversations(subject: Simulation, count: int = 120, turns: int = 8) -> Result:
    """Many talks of several turns in random order, behind one of four system prompts."""
    rng = random.Random(3)
    systems = [tokens(rng, 160) for _ in range(4)]
    talks = [list(rng.choice(systems)) for _ in range(count)]
    left = [number for number in range(count) for _ in range(turns)]
    rng.shuffle(left)
    for number in left:
        talks[number] += tokens(rng, rng.randint(20, 80))
        subject.request(talks[number])
        # The answer, which is a part of the next prompt.
        talks[number] += tokens(rng, rng.randint(20, 120))
    return subject.result()


def skewed(subject: Simulation, count: int = 2000) -> Result:
    """One-shot prompts, half of which begin with the same long text, a third with another."""
    rng = random.Random(4)
    heads = [tokens(rng, 800) for _ in range(12)]
    weights = [48, 30] + [2] * 10
    for _ in range(count):
        (head,) = rng.choices(heads, weights)
        subject.request(head + tokens(rng, 40))
    return subject.result()


def test_conversations_hit_the_cache_far_more_often_than_at_random() -> None:
    by_prefix = conversations(Simulation(Chooser))
    at_random = conversations(Simulation(None))
    print(f"conversations: prefix {by_prefix}, random {at_random}")
    assert by_prefix.hit_rate > 0.75
    assert by_prefix.hit_rate > 1.4 * at_random.hit_rate
    assert by_prefix.served_to_mean < 1.25


def test_a_skewed_set_of_prompts_stays_balanced() -> None:
    by_prefix = skewed(Simulation(Chooser))
    at_random = skewed(Simulation(None))
    print(f"skewed: prefix {by_prefix}, random {at_random}")
    assert by_prefix.hit_rate > 0.9 * at_random.hit_rate
    assert by_prefix.peak_to_mean < 1.5
    assert by_prefix.served_to_mean < 1.5
