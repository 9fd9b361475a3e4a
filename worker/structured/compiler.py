"""Compiles rules on threads of its own, so that the steps go on meanwhile.

Everything is bounded: how long a request waits for its rule, how many rules are kept, and
how many are under way, which is at most one for each waiting request.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from shared.errors import InvalidArgumentError, QueueFullError, ServingError
from shared.types import StructuredOutput
from worker.structured.contract import CompiledRule, GrammarLibrary

# One hostile rule does not keep the others waiting.
_NUM_THREADS = 2
_RETRY_AFTER_MS = 1000

Outcome = CompiledRule | ServingError


@dataclass(slots=True)
class _Job:
    """A rule under way, and when each request that waits for it has waited long enough."""

    future: "Future[CompiledRule]"
    deadlines: dict[int, float] = field(default_factory=dict)


class RuleCompiler:
    """One thread uses it; `wake` is called from another whenever `take_done` has news."""

    def __init__(
        self,
        library: GrammarLibrary,
        *,
        cache_entries: int,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._library = library
        self._cache_entries = cache_entries
        self._timeout_s = timeout_s
        self._wake = wake
        # Refused rules too, so that asking again costs nothing. The last used come last.
        self._cache: OrderedDict[StructuredOutput, Outcome] = OrderedDict()
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rule-compiler")

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def find(self, structure: StructuredOutput) -> Outcome | None:
        """What became of the rule, if it is known."""
        outcome = self._cache.get(structure)
        if outcome is not None:
            self._cache.move_to_end(structure)
        return outcome

    def request(self, uid: int, structure: StructuredOutput, now: float) -> None:
        """Compiles the rule; `take_done` will tell of it."""
        job = self._jobs.get(structure)
        if job is None:
            job = _Job(self._pool.submit(self._library.compile, structure))
            self._jobs[structure] = job
            job.future.add_done_callback(lambda _: self._wake())
        job.deadlines[uid] = now + self._timeout_s

    def forget(self, is_live: Callable[[int], bool]) -> None:
        """Drops the requests that wait no more, and what nobody waits for if it can be."""
        for structure, job in list(self._jobs.items()):
            for uid in [uid for uid in job.deadlines if not is_live(uid)]:
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
                outcome = _outcome_of(job.future)
                self._keep(structure, outcome)
                del self._jobs[structure]
                told += [(uid, outcome) for uid in job.deadlines]
                continue
            for uid in [uid for uid, at in job.deadlines.items() if at <= now]:
                del job.deadlines[uid]
                told.append((uid, self._too_late(job)))
        return told

    def close(self) -> None:
        """Waits for none of what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, structure: StructuredOutput, outcome: Outcome) -> None:
        self._cache[structure] = outcome
        while len(self._cache) > self._cache_entries:
            self._cache.popitem(last=False)

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


def _outcome_of(future: "Future[CompiledRule]") -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ServingError):
        return error
    return ServingError(f"the structured output could not be compiled: {error}")
