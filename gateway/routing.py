"""Which of several workers is best for a prompt: the rules, without the workers.

Suspect and full workers are passed over while there are others. Among the rest, the policy
decides; `prefix` is cached tokens weighed against load, within a bound on how much more than
its share a worker may have.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Protocol, TypeVar

from gateway.affinity import PrefixMemory, PromptPrefix


class RoutingPolicy(Enum):
    """How a worker is chosen."""

    # Where the longest part of the prompt is cached, unless that worker has too much to do.
    PREFIX = "prefix"
    # The less loaded of two at random: no herd towards the one that seemed least loaded.
    POWER_OF_TWO = "power-of-two"
    LEAST_LOADED = "least-loaded"


class Reason(Enum):
    """Why a worker got a request."""

    # No other could have had it.
    ONLY = "only"
    # It has a beginning of the prompt, as far as is known.
    PREFIX = "prefix"
    # No worker near the mean load has one; the prompt's hash says whose it is.
    HASH = "hash"
    # It has less to do, and that decided.
    LOAD = "load"


class Candidate(Protocol):
    """A ready worker, as far as choosing goes."""

    @property
    def address(self) -> str: ...
    @property
    def prefixes(self) -> PrefixMemory: ...
    @property
    def page_size(self) -> int: ...
    @property
    def capacity(self) -> int:
        """Requests that run at once; at least 1."""
        ...

    @property
    def num_outstanding(self) -> int:
        """Requests that run or wait there, of all gateways."""
        ...

    @property
    def is_full(self) -> bool: ...
    def is_suspect(self, now: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class RoutingWeights:
    """What is weighed against what under `prefix`."""

    # Cached tokens that outweigh one request more in a worker of average size: about the
    # prefill that takes as long as a row more makes all later steps take.
    tokens_per_request: float = 32.0
    # A worker takes no more than this much of an average load, and a few requests beyond it,
    # so that affinity does not give way while there is next to nothing to do.
    most_of_mean: float = 1.25
    slack: float = 4.0


C = TypeVar("C", bound=Candidate)


class Chooser:
    """Chooses among candidates; remembers only whose turn it is among equals."""

    def __init__(
        self,
        policy: RoutingPolicy = RoutingPolicy.PREFIX,
        weights: RoutingWeights = RoutingWeights(),
        rng: random.Random | None = None,
    ) -> None:
        self.policy = policy
        self._weights = weights
        self._rng = rng or random.Random()
        self._turn = 0

    def choose(
        self, candidates: Sequence[C], prompt: PromptPrefix | None, now: float
    ) -> tuple[C, Reason]:
        """One of the candidates, of which there must be one at least."""
        if len(candidates) == 1:
            return candidates[0], Reason.ONLY
        # A suspect worker is still better than none, and so is a full one's own refusal.
        ranks = [(one.is_suspect(now), one.is_full) for one in candidates]
        best = min(ranks)
        fit = [one for one, rank in zip(candidates, ranks, strict=True) if rank == best]
        # Equals take turns, so that idle workers share what comes one at a time.
        self._turn = (self._turn + 1) % len(fit)
        fit = fit[self._turn :] + fit[: self._turn]
        if self.policy is RoutingPolicy.POWER_OF_TWO:
            fit = self._rng.sample(fit, min(2, len(fit)))
        elif self.policy is RoutingPolicy.PREFIX and prompt is not None:
            return self._by_prefix(fit, prompt)
        return min(fit, key=_load), Reason.LOAD

    def _by_prefix(self, fit: list[C], prompt: PromptPrefix) -> tuple[C, Reason]:
        weights = self._weights
        mean_capacity = sum(one.capacity for one in fit) / len(fit)
        loads = [_load(one) * mean_capacity for one in fit]
        mean = (sum(loads) + 1) / len(fit)
        bound = weights.most_of_mean * mean + weights.slack
        # The least loaded is always within.
        near = [(one, load) for one, load in zip(fit, loads, strict=True) if load + 1 <= bound]
        if not any(prompt.names(one.page_size) for one, _ in near):
            # Too short for any cache.
            return min(fit, key=_load), Reason.LOAD
        scored = [
            (one.prefixes.matched_tokens(prompt, one.page_size), load, one) for one, load in near
        ]
        if not any(matched for matched, _, _ in scored):
            # Nobody has it. All gateways agree, without a word, on who shall.
            owner = max((one for one, _ in near), key=lambda one: _affinity(prompt.head, one))
            return owner, Reason.HASH
        matched, _, best = max(
            scored, key=lambda entry: entry[0] - weights.tokens_per_request * entry[1]
        )
        return best, Reason.PREFIX if matched else Reason.LOAD


def _load(one: Candidate) -> float:
    return one.num_outstanding / one.capacity


def _affinity(head: bytes, one: Candidate) -> bytes:
    """Rendezvous hashing: when workers come or go, only their own prompts move."""
    return blake2b(head + one.address.encode(), digest_size=8).digest()
