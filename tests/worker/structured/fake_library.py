"""A grammar library whose rules are lists of token ids, and whose compiler the test stops."""

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from shared.errors import InvalidArgumentError
from shared.types import StructuredOutput, StructureKind
from worker.step import Int32Array
from worker.structured.contract import Matcher

NONSENSE = "nonsense"


def rule(token_ids: Sequence[int]) -> StructuredOutput:
    """Just these tokens, and then the end."""
    return StructuredOutput(StructureKind.GRAMMAR, " ".join(map(str, token_ids)))


class FakeLibrary:
    """`log` holds ("fill", tokens accepted by the matcher so far) for each mask, and
    ("accept", how many at a time) for tokens that are accepted together."""

    def __init__(self, vocab_size: int, eos: int, *, gated: bool = False, threads: int = 1) -> None:
        self.threads = threads
        self._vocab_size = vocab_size
        self._eos = eos
        self.gate = threading.Event()
        if not gated:
            self.gate.set()
        # Set while a compiler is at work.
        self.compiling = threading.Event()
        self.compiled: list[str] = []
        # How many tokens were accepted, by which of the compilations.
        self.accepted_by: Counter[int] = Counter()
        self.log: list[tuple[str, int]] = []
        # A matcher that has accepted as many tokens has a fault, to which the rule is to blame.
        self.limit = 1 << 20
        # So many matchers can be made.
        self.matchers_left = 1 << 20
        # (where, first token of the rule): what is raised there.
        self.broken: dict[tuple[str, int], BaseException] = {}
        # What accepting together raises once the first has accepted.
        self.panic: BaseException | None = None
        self.rule_bytes = 1000

    @property
    def mask_words(self) -> int:
        return -(-self._vocab_size // 32)

    def compile(self, structure: StructuredOutput) -> "FakeRule":
        self.compiling.set()
        self.gate.wait()
        self.compiled.append(structure.text)
        if structure.text == NONSENSE:
            raise InvalidArgumentError("structured_output.grammar", "makes no sense")
        token_ids = [int(part) for part in structure.text.split()]
        self.stumble("compile", token_ids)
        return FakeRule(self, token_ids, len(self.compiled))

    def stumble(self, where: str, token_ids: Sequence[int]) -> None:
        error = self.broken.get((where, token_ids[0]))
        if error is not None:
            raise error

    def accept(self, tokens: Sequence[tuple[Matcher, int]]) -> list[int]:
        self.log.append(("accept", len(tokens)))
        faulty = []
        for place, (matcher, token_id) in enumerate(tokens):
            assert isinstance(matcher, FakeMatcher)
            if not matcher.accept_safely(token_id):
                faulty.append(place)
            if self.panic is not None:
                raise self.panic
        return faulty

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bitmasks: Int32Array) -> list[int]:
        for matcher, row in matchers:
            assert isinstance(matcher, FakeMatcher)
            self.stumble("fill", matcher.token_ids)
            self.log.append(("fill", len(matcher.accepted)))
            wanted = [*matcher.token_ids, self._eos][len(matcher.accepted)]
            bitmasks[row] = 0
            bitmasks[row, wanted // 32] = np.uint32(1 << wanted % 32).astype(np.int32)
        return [i for i, (matcher, _) in enumerate(matchers) if matcher.fault() is not None]


class FakeRule:
    """Compiled."""

    def __init__(self, library: FakeLibrary, token_ids: list[int], number: int) -> None:
        self._library = library
        self._token_ids = token_ids
        self._number = number

    @property
    def num_bytes(self) -> int:
        return self._library.rule_bytes

    def matcher(self) -> "FakeMatcher":
        self._library.stumble("matcher", self._token_ids)
        if not self._library.matchers_left:
            raise RuntimeError("no more matchers")
        self._library.matchers_left -= 1
        return FakeMatcher(self._library, self._token_ids, self._number)


class FakeMatcher:
    """Remembers what it accepted."""

    def __init__(self, library: FakeLibrary, token_ids: list[int], number: int) -> None:
        self._library = library
        self.token_ids = token_ids
        self._number = number
        self.accepted: list[int] = []
        self._is_broken = False

    def accept(self, token_id: int) -> bool:
        self._library.stumble("accept", self.token_ids)
        self.accepted.append(token_id)
        self._library.accepted_by[self._number] += 1
        return self.fault() is None

    def accept_safely(self, token_id: int) -> bool:
        """As the library's own threads do: what one raises is its fault."""
        try:
            return self.accept(token_id)
        except BaseException:
            self._is_broken = True
            return False

    def fault(self) -> tuple[str, bool] | None:
        if self._is_broken:
            return "broken", False
        self._library.stumble("fault", self.token_ids)
        if len(self.accepted) >= self._library.limit:
            return "too many tokens", True
        if self.accepted != self.token_ids[: len(self.accepted)]:
            return f"does not follow {self.token_ids}: {self.accepted}", False
        return None
