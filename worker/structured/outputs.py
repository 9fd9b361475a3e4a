"""Structured outputs of the running requests: their rules, where each stands, their masks."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidArgumentError, ServingError
from shared.types import StructuredOutput
from worker.step import Int32Array
from worker.structured.compiler import Outcome, RuleCompiler
from worker.structured.contract import CompiledRule, GrammarLibrary, Matcher

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
# An ordinary rule is taken for some megabytes, though it has less.
_CACHE_BYTES = 512 << 20
# A quarter of the queue as it is by default.
_MOST_WAITING = 256

Fault = tuple[int, ServingError]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """A request with its matcher, and by how much that was too slow so far."""

    matcher: Matcher
    rule: CompiledRule
    excess_s: float = 0.0
    # The matcher raised something, after which it is not to be trusted.
    is_broken: bool = False


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
        most_waiting: int = _MOST_WAITING,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """`wake` is called on another thread whenever `take_ready` has news.

        At most `most_waiting` requests wait for their rules at a time.
        """
        self._library = library
        self._compiler = RuleCompiler(
            library,
            cache_entries=cache_entries,
            cache_bytes=cache_bytes,
            most_waiting=most_waiting,
            timeout_s=timeout_s,
            wake=wake,
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

        Raises ServingError for a rule that is known to be bad or cannot be followed, and
        QueueFullError when too many wait for theirs.
        """
        outcome = self._compiler.find(structure)
        if outcome is None:
            self._compiler.request(uid, structure, now)
            return False
        error = self._follow(uid, outcome)
        if error is not None:
            # It is one object for all who ask, and each raise would lengthen its traceback.
            raise error.with_traceback(None)
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
            try:
                followed.matcher.accept(token_id)
            except BaseException as error:
                _note_broken(uid, followed, error)
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
            self._fill_together(followed, bitmasks)
        else:
            self._fill_each(followed, bitmasks)
            if not self._found_slow:
                # Accepting and filling count as one each.
                self._num_trusted = 2 * _TRUSTED_STEPS
            self._times_each = self._found_slow
            self._found_slow = False
        self._took(time.perf_counter() - began_at)

    def _fill_together(
        self, followed: list[tuple[int, int, _Followed]], bitmasks: Int32Array
    ) -> None:
        try:
            self._library.fill([(one.matcher, row) for row, _, one in followed], bitmasks)
        except BaseException as error:
            _reraise_exit(error)
            # Whose fault it is shows when each is asked alone; the others have their masks then.
            self._fill_each(followed, bitmasks)

    def _fill_each(self, followed: list[tuple[int, int, _Followed]], bitmasks: Int32Array) -> None:
        for row, uid, one in followed:
            used_s = time.thread_time()
            try:
                self._library.fill([(one.matcher, row)], bitmasks)
            except BaseException as error:
                _note_broken(uid, one, error)
            self._charge(one, time.thread_time() - used_s)

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
        try:
            matcher = outcome.matcher()
        except BaseException as error:
            _reraise_exit(error)
            _log.error("no matcher could be made for request %d", uid, exc_info=error)
            self._compiler.drop(outcome)
            return _fault_of_ours()
        self._followed[uid] = _Followed(matcher, outcome)
        return None

    def _faults_of(self, uid: int, followed: _Followed) -> list[Fault]:
        """At most one, after which the request is not followed any more."""
        error = _error_of(uid, followed)
        if error is None:
            return []
        del self._followed[uid]
        # All matchers of a rule share what the library learnt of it, and may share the fault:
        # once it knows as many states as it may, every one that needs another fails.
        self._compiler.drop(followed.rule)
        return [(uid, error)]


def _error_of(uid: int, followed: _Followed) -> ServingError | None:
    fault = None
    if not followed.is_broken:
        try:
            fault = followed.matcher.fault()
        except BaseException as error:
            _note_broken(uid, followed, error)
    if followed.is_broken:
        return _fault_of_ours()
    if fault is not None:
        message, is_limit = fault
        if is_limit:
            return InvalidArgumentError("structured_output", f"is too complex to follow: {message}")
        return ServingError(f"the structured output could not be followed: {message}")
    if followed.excess_s > _MOST_EXCESS_S:
        return InvalidArgumentError(
            "structured_output",
            f"takes more than {1e3 * _SLOW_S:g} ms to follow by a token; simplify it",
        )
    return None


def _note_broken(uid: int, followed: _Followed, error: BaseException) -> None:
    _reraise_exit(error)
    _log.error("the matcher of request %d broke", uid, exc_info=error)
    followed.is_broken = True


def _reraise_exit(error: BaseException) -> None:
    """All else is the matcher's: a panic of the library, too, which is no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


def _fault_of_ours() -> ServingError:
    return ServingError("the structured output could not be followed; the worker's log has more")
