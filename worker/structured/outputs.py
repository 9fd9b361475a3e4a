"""Structured outputs of the running requests: their rules, where each stands, their masks."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidArgumentError, ServingError
from shared.types import StructuredOutput
from worker.step import Int32Array
from worker.structured.compiler import Outcome, RuleCompiler
from worker.structured.contract import GrammarLibrary, Matcher
from worker.structured.rule import Rule

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
    rule: Rule
    # No token yet.
    is_new: bool = True
    excess_s: float = 0.0
    # The matcher raised something, after which it is not to be trusted.
    is_broken: bool = False

    @property
    def is_too_slow(self) -> bool:
        return self.excess_s > _MOST_EXCESS_S


# uid, and the token id that it goes on by.
_Going = tuple[int, _Followed, int]
# Row of its mask, and uid.
_Filling = tuple[int, int, _Followed]
# Who may have a fault, so that only these are asked: most steps have none.
_Suspect = tuple[int, _Followed]


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

    def forget(self, live: Set[int]) -> None:
        """Drops what belongs to requests that have ended, those that are not `live`."""
        for uid in [uid for uid in self._followed if uid not in live]:
            self._leave(uid)
        self._compiler.forget(live)

    def accept(self, tokens: Iterable[tuple[int, int]]) -> list[Fault]:
        """(uid, token id) of requests that go on; returns those that cannot. One that has ended
        is passed over."""
        going: list[_Going] = []
        for uid, token in tokens:
            one = self._followed.get(uid)
            if one is None:
                continue
            if one.is_new:
                self._settle(uid, one)
            going.append((uid, one, token))
        began_at = time.perf_counter()
        if self._times_each or self._library.threads == 1 or len(going) < 2:
            suspects = self._accept_each(going)
        else:
            suspects = self._accept_together(going)
        self._took(time.perf_counter() - began_at)
        return self._faults_of(suspects)

    def fill(
        self, uids: Sequence[int], bitmasks: Int32Array | None = None
    ) -> tuple[Int32Array, list[Fault]]:
        """What each request may sample now: [len(uids), ceil(vocab_size / 32)], in the first rows
        of `bitmasks`, or else in memory of its own until the next call. One that has ended may
        sample anything, and so may those that are returned as faulty, which must end."""
        bitmasks = (self._bitmasks if bitmasks is None else bitmasks)[: len(uids)]
        filling: list[_Filling] = []
        for row, uid in enumerate(uids):
            one = self._followed.get(uid)
            if one is None:
                bitmasks[row] = _ALL_IDS
            else:
                filling.append((row, uid, one))
        suspects = self._fill(filling, bitmasks)
        faults = self._faults_of((uid, one) for _, uid, one in suspects)
        if faults:
            ended = {uid for uid, _ in faults}
            for row, uid, _ in suspects:
                if uid in ended:
                    bitmasks[row] = _ALL_IDS
        return bitmasks, faults

    def close(self) -> None:
        self._compiler.close()

    def _accept_each(self, going: list[_Going]) -> list[_Suspect]:
        suspects: list[_Suspect] = []
        times_each = self._times_each
        for uid, one, token_id in going:
            used_s = time.thread_time() if times_each else 0.0
            is_sound = False
            try:
                is_sound = one.matcher.accept(token_id)
            except BaseException as error:
                _note_broken(uid, one, error)
            if times_each:
                self._charge(one, time.thread_time() - used_s)
            if not is_sound or one.is_too_slow:
                suspects.append((uid, one))
        return suspects

    def _accept_together(self, going: list[_Going]) -> list[_Suspect]:
        try:
            places = self._library.accept([(one.matcher, token_id) for _, one, token_id in going])
        except BaseException as error:
            _reraise_exit(error)
            _log.error("the matchers of %d requests broke", len(going), exc_info=error)
            for _, one, _ in going:
                one.is_broken = True
            places = list(range(len(going)))
        return [going[place][:2] for place in places]

    def _fill(self, filling: list[_Filling], bitmasks: Int32Array) -> list[_Filling]:
        """Those that may have a fault."""
        began_at = time.perf_counter()
        if not self._times_each:
            suspects = self._fill_together(filling, bitmasks)
        else:
            suspects = self._fill_each(filling, bitmasks)
            if not self._found_slow:
                # Accepting and filling count as one each.
                self._num_trusted = 2 * _TRUSTED_STEPS
            self._times_each = self._found_slow
            self._found_slow = False
        self._took(time.perf_counter() - began_at)
        return suspects

    def _fill_together(self, filling: list[_Filling], bitmasks: Int32Array) -> list[_Filling]:
        try:
            places = self._library.fill([(one.matcher, row) for row, _, one in filling], bitmasks)
        except BaseException as error:
            _reraise_exit(error)
            # Whose fault it is shows when each is asked alone; the others have their masks then.
            return self._fill_each(filling, bitmasks)
        return [filling[place] for place in places]

    def _fill_each(self, filling: list[_Filling], bitmasks: Int32Array) -> list[_Filling]:
        suspects: list[_Filling] = []
        for row, uid, one in filling:
            used_s = time.thread_time()
            is_sound = False
            try:
                is_sound = not self._library.fill([(one.matcher, row)], bitmasks)
            except BaseException as error:
                _note_broken(uid, one, error)
            self._charge(one, time.thread_time() - used_s)
            if not is_sound or one.is_too_slow:
                suspects.append((row, uid, one))
        return suspects

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
        matcher = _matcher_of(outcome, uid)
        if matcher is None:
            self._compiler.drop(outcome)
            return _fault_of_ours()
        self._followed[uid] = _Followed(matcher, outcome)
        outcome.num_followers += 1
        self._compiler.spread(outcome)
        return None

    def _settle(self, uid: int, one: _Followed) -> None:
        """Before its first token any copy of its rule does, and there may be more by now than
        when it came: those who come together do not all stay with the first."""
        one.is_new = False
        if one.rule.has_copies:
            one.matcher = _matcher_of(one.rule, uid) or one.matcher

    def _leave(self, uid: int) -> None:
        self._followed.pop(uid).rule.num_followers -= 1

    def _faults_of(self, suspects: Iterable[_Suspect]) -> list[Fault]:
        """A request with a fault is not followed any more."""
        faults: list[Fault] = []
        for uid, followed in suspects:
            error = _error_of(uid, followed)
            if error is None:
                continue
            faults.append((uid, error))
            self._leave(uid)
            # Matchers of a rule share what the library learnt of it, and may share the fault:
            # once it knows as many states as it may, every one that needs another fails.
            self._compiler.drop(followed.rule)
        return faults


def _matcher_of(rule: Rule, uid: int) -> Matcher | None:
    """None, and the log says why: the library is at fault."""
    try:
        return rule.matcher()
    except BaseException as error:
        _reraise_exit(error)
        _log.error("no matcher could be made for request %d", uid, exc_info=error)
        return None


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
    if followed.is_too_slow:
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
