"""Compiles rules on threads of its own, so that the steps go on meanwhile.

Everything is bounded: how many requests wait for their rules and how long, so how many rules
are under way, and how many are kept and how large.

A rule that many follow gets copies, so that they need not wait for each other.
"""

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from shared.errors import InvalidArgumentError, QueueFullError, ServingError
from shared.types import StructuredOutput
from worker.structured.compiler_threads import CompilerThreads
from worker.structured.contract import CompiledRule, GrammarLibrary
from worker.structured.rule import Rule

# One hostile rule does not keep the others waiting.
_NUM_THREADS = 2
_RETRY_AFTER_MS = 1000
# At the end, for rules under way: the slowest known takes half a second.
_PATIENCE_S = 1.0
# Of an entry of the cache beside its rule and its texts.
_ENTRY_BYTES = 1024
# Beyond so many there is another copy: one after the other, their masks take 0.1 to 0.2 ms.
_FOLLOWERS_OF_A_COPY = 8
# Larger ones take tens of milliseconds to compile.
_MOST_COPIED_BYTES = 8_000_000

Outcome = Rule | ServingError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A rule under way, and when each request that waits for it has waited long enough."""

    future: "Future[CompiledRule]"
    deadlines: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Known:
    """What became of a rule, and about what keeping it takes."""

    outcome: Rule | InvalidArgumentError
    num_bytes: int


class RuleCompiler:
    """One thread uses it; `wake` is called from another whenever `take_done` has news."""

    def __init__(
        self,
        library: GrammarLibrary,
        *,
        cache_entries: int,
        cache_bytes: int,
        most_waiting: int,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._library = library
        self._cache_entries = cache_entries
        self._cache_bytes = cache_bytes
        self._most_waiting = most_waiting
        self._timeout_s = timeout_s
        self._wake = wake
        # Refused rules too, so that asking again costs nothing. The last used come last.
        self._cache: OrderedDict[StructuredOutput, _Known] = OrderedDict()
        self._cached_bytes = 0
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._threads = CompilerThreads(_NUM_THREADS)
        # No rule waits for copies of others.
        self._copying = CompilerThreads(1)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def find(self, structure: StructuredOutput) -> Outcome | None:
        """What became of the rule, if it is known."""
        known = self._cache.get(structure)
        if known is None:
            return None
        self._cache.move_to_end(structure)
        return known.outcome

    def spread(self, rule: Rule) -> None:
        """Has the rule copied once more if so many follow it."""
        wanted = min(self._library.threads, -(-rule.num_followers // _FOLLOWERS_OF_A_COPY))
        known = self._cache.get(rule.structure)
        if rule.num_copies >= wanted or known is None or known.outcome is not rule:
            return
        num_bytes = known.num_bytes + rule.num_bytes
        if rule.num_bytes > _MOST_COPIED_BYTES or num_bytes > self._cache_bytes:
            return
        rule.num_copies += 1
        self._cache[rule.structure] = replace(known, num_bytes=num_bytes)
        self._cache.move_to_end(rule.structure)
        self._cached_bytes += rule.num_bytes
        self._trim()
        future = self._copying.submit(self._library.compile, rule.structure)
        future.add_done_callback(partial(_add_copy, rule))

    def drop(self, rule: Rule) -> None:
        """It went wrong in use, so it is compiled anew for those who ask from now on."""
        known = self._cache.get(rule.structure)
        if known is not None and known.outcome is rule:
            self._forget_outcome(rule.structure)

    def request(self, uid: int, structure: StructuredOutput, now: float) -> None:
        """Compiles the rule; `take_done` will tell of it. QueueFullError: too many wait."""
        num_waiting = sum(len(job.deadlines) for job in self._jobs.values())
        # Those that were given up count as long as they stand before hanging compilers.
        num_waiting = max(num_waiting, self._threads.num_queued)
        if num_waiting >= self._most_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait for their structured outputs to be compiled, "
                f"the limit is {self._most_waiting}",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        job = self._jobs.get(structure)
        if job is None:
            job = _Job(self._threads.submit(self._library.compile, structure))
            self._jobs[structure] = job
            job.future.add_done_callback(lambda _: self._wake())
        job.deadlines[uid] = now + self._timeout_s

    def forget(self, live: Set[int]) -> None:
        """Drops the requests that wait no more, and what nobody waits for if it can be."""
        for structure, job in list(self._jobs.items()):
            for uid in [uid for uid in job.deadlines if uid not in live]:
                del job.deadlines[uid]
            if not job.deadlines and job.future.cancel():
                del self._jobs[structure]

    def next_deadline(self) -> float | None:
        """When `take_done` will have news even if nothing is compiled by then."""
        deadlines = [at for job in self._jobs.values() for at in job.deadlines.values()]
        return min(deadlines, default=None)

    def take_done(self, now: float) -> list[tuple[int, Outcome]]:
        """Requests whose rule is compiled or refused, or which have waited too long."""
        told: list[tuple[int, Outcome]] = []
        for structure, job in list(self._jobs.items()):
            if job.future.done():
                outcome = _outcome_of(job.future, structure)
                self._keep(structure, outcome)
                del self._jobs[structure]
                told += [(uid, outcome) for uid in job.deadlines]
                continue
            for uid in [uid for uid, at in job.deadlines.items() if at <= now]:
                del job.deadlines[uid]
                told.append((uid, self._too_late(job)))
        return told

    def close(self) -> None:
        """Waits about a second at most for what is under way."""
        deadline = time.monotonic() + _PATIENCE_S
        for threads in (self._threads, self._copying):
            threads.stop()
        for threads in (self._threads, self._copying):
            threads.join(deadline)

    def _keep(self, structure: StructuredOutput, outcome: Outcome) -> None:
        """Only what would come out the same again: a rule, or what is wrong with it."""
        if isinstance(outcome, ServingError) and not isinstance(outcome, InvalidArgumentError):
            return
        num_bytes = _ENTRY_BYTES + sum(map(sys.getsizeof, (structure.text, *structure.choices)))
        if not isinstance(outcome, ServingError):
            num_bytes += outcome.num_bytes
        if num_bytes > self._cache_bytes:
            return
        self._cache[structure] = _Known(outcome, num_bytes)
        self._cached_bytes += num_bytes
        self._trim()

    def _trim(self) -> None:
        while len(self._cache) > self._cache_entries or self._cached_bytes > self._cache_bytes:
            self._forget_outcome(next(iter(self._cache)))

    def _forget_outcome(self, structure: StructuredOutput) -> None:
        self._cached_bytes -= self._cache.pop(structure).num_bytes

    def _too_late(self, job: _Job) -> ServingError:
        if job.future.running():
            return InvalidArgumentError(
                "structured_output",
                f"is not compiled after {self._timeout_s:g} s, which is the limit; simplify it",
            )
        return QueueFullError(
            f"structured outputs of other requests have been compiled for {self._timeout_s:g} s",
            retry_after_ms=_RETRY_AFTER_MS,
        )


def _add_copy(rule: Rule, future: "Future[CompiledRule]") -> None:
    if future.cancelled():
        return
    error = future.exception()
    if error is None:
        rule.add(future.result())
    else:
        # There are as many as before, which do.
        _log.warning("a structured output could not be compiled once more", exc_info=error)


def _outcome_of(future: "Future[CompiledRule]", structure: StructuredOutput) -> Outcome:
    error = future.exception()
    if error is None:
        return Rule(structure, future.result())
    if isinstance(error, ServingError):
        # Kept for long, and its traceback would keep all that the compiler had at hand.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    _log.error("a structured output could not be compiled", exc_info=error)
    return ServingError("the structured output could not be compiled; the worker's log has more")
