"""Structured outputs of the running requests: their rules, where each stands, their masks."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidArgumentError, ServingError
from shared.types import StructuredOutput
from worker.step import Int32Array
from worker.structured.compiler import Outcome, RuleCompiler
from worker.structured.contract import GrammarLibrary, Matcher

_ALL_IDS = np.int32(-1)
# A matcher that takes longer for a token holds up every other request's, too.
_SLOW_S = 0.01
# By how much it may exceed that, all its tokens together.
_MOST_EXCESS_S = 0.5
# When all matchers together take as long, each is timed in the next step. If none was slow,
# as when there are many or the machine is busy, so many steps are left alone but for those
# that take much longer.
_SUSPICIOUS_S = 0.02
_VERY_SUSPICIOUS_S = 0.1
_TRUSTED_STEPS = 50

Fault = tuple[int, ServingError]


@dataclass(slots=True)
class _Followed:
    """A request with its matcher, and by how much that was too slow so far."""

    matcher: Matcher
    excess_s: float = 0.0


class StructuredOutputs:
    """Belongs to the engine loop's thread; compiles on others. Close it."""

    def __init__(
        self,
        library: GrammarLibrary,
        *,
        cache_entries: int,
        timeout_s: float,
        max_rows: int,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called on another thread whenever `take_ready` has news."""
        self._library = library
        self._compiler = RuleCompiler(
            library, cache_entries=cache_entries, timeout_s=timeout_s, wake=wake
        )
        self._followed: dict[int, _Followed] = {}
        # Reused by every step: whoever takes masks copies what it needs.
        self._bitmasks = np.zeros((max_rows, library.mask_words), np.int32)
        # Each matcher's work of this step is timed, and done by this thread alone.
        self._times_each = False
        self._found_slow = False
        self._num_trusted = 0

    def begin(self, uid: int, structure: StructuredOutput, now: float) -> bool:
        """Whether the request may run at once; otherwise `take_ready` tells when.

        Raises ServingError for a rule that is known to be bad.
        """
        outcome = self._compiler.find(structure)
        if outcome is None:
            self._compiler.request(uid, structure, now)
            return False
        if isinstance(outcome, ServingError):
            raise outcome
        self._followed[uid] = _Followed(outcome.matcher())
        return True

    @property
    def is_idle(self) -> bool:
        """Nothing is followed and nothing waited for."""
        return not self._followed and self._compiler.is_idle

    def take_ready(self, now: float) -> list[tuple[int, ServingError | None]]:
        """Requests that may run from now on, or that must end with an error."""
        if self._compiler.is_idle:
            return []
        return [(uid, self._follow(uid, outcome)) for uid, outcome in self._compiler.take_done(now)]

    def next_deadline(self) -> float | None:
        """When `take_ready` will have news at the latest, if anything is waited for."""
        return self._compiler.next_deadline()

    def forget(self, is_live: Callable[[int], bool]) -> None:
        """Drops what belongs to requests that have ended."""
        for uid in [uid for uid in self._followed if not is_live(uid)]:
            del self._followed[uid]
        self._compiler.forget(is_live)

    def accept(self, tokens: Iterable[tuple[int, int]]) -> list[Fault]:
        """(uid, token id) of requests that go on; returns those that cannot."""
        faults: list[Fault] = []
        times_each = self._times_each
        began_at = time.perf_counter()
        for uid, token_id in tokens:
            followed = self._followed.get(uid)
            if followed is None:
                continue
            used_s = time.thread_time() if times_each else 0.0
            followed.matcher.accept(token_id)
            if times_each:
                self._charge(followed, time.thread_time() - used_s)
            faults += self._faults_of(uid, followed)
        self._took(time.perf_counter() - began_at)
        return faults

    def fill(self, uids: Sequence[int]) -> tuple[Int32Array, list[Fault]]:
        """What each request may sample now: [len(uids), ceil(vocab_size / 32)], until the next
        call. One that has ended may sample anything, and so may those that are returned as
        faulty, which must end."""
        bitmasks = self._bitmasks[: len(uids)]
        followed: list[tuple[int, int, _Followed]] = []
        for row, uid in enumerate(uids):
            one = self._followed.get(uid)
            if one is None:
                bitmasks[row] = _ALL_IDS
            else:
                followed.append((row, uid, one))
        self._fill(followed, bitmasks)
        faults: list[Fault] = []
        for row, uid, one in followed:
            if found := self._faults_of(uid, one):
                bitmasks[row] = _ALL_IDS
                faults += found
        return bitmasks, faults

    def close(self) -> None:
        self._compiler.close()

    def _fill(self, followed: list[tuple[int, int, _Followed]], bitmasks: Int32Array) -> None:
        began_at = time.perf_counter()
        if not self._times_each:
            self._library.fill([(one.matcher, row) for row, _, one in followed], bitmasks)
        else:
            for row, _, one in followed:
                used_s = time.thread_time()
                self._library.fill([(one.matcher, row)], bitmasks)
                self._charge(one, time.thread_time() - used_s)
            if not self._found_slow:
                # Accepting and filling count as one each.
                self._num_trusted = 2 * _TRUSTED_STEPS
            self._times_each = self._found_slow
            self._found_slow = False
        self._took(time.perf_counter() - began_at)

    def _charge(self, followed: _Followed, seconds: float) -> None:
        if seconds > _SLOW_S:
            followed.excess_s += seconds - _SLOW_S
            self._found_slow = True

    def _took(self, seconds: float) -> None:
        """Of all matchers together."""
        limit_s = _VERY_SUSPICIOUS_S if self._num_trusted else _SUSPICIOUS_S
        self._num_trusted = max(0, self._num_trusted - 1)
        if seconds > limit_s:
            self._times_each = True

    def _follow(self, uid: int, outcome: Outcome) -> ServingError | None:
        if isinstance(outcome, ServingError):
            return outcome
        self._followed[uid] = _Followed(outcome.matcher())
        return None

    def _faults_of(self, uid: int, followed: _Followed) -> list[Fault]:
        """At most one, after which the request is not followed any more."""
        fault = followed.matcher.fault()
        if fault is None and followed.excess_s <= _MOST_EXCESS_S:
            return []
        del self._followed[uid]
        if fault is None:
            message = f"takes more than {1e3 * _SLOW_S:g} ms to follow by a token; simplify it"
            return [(uid, InvalidArgumentError("structured_output", message))]
        message, is_limit = fault
        if is_limit:
            error: ServingError = InvalidArgumentError(
                "structured_output", f"is too complex to follow: {message}"
            )
        else:
            error = ServingError(f"the structured output could not be followed: {message}")
        return [(uid, error)]
