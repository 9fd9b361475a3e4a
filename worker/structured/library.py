"""The grammar library: llguidance. Nothing else knows it.

Chosen over xgrammar 0.2.9 on the same 200 schemas with SmolLM2's vocabulary of 49,152, on two
busy cores: it compiles in 1.3 ms (p99 8.3) where xgrammar takes 16 ms (p99 910), needs neither
torch nor transformers, and has a limit for nearly every kind of work. None of its 333 ended
outputs broke its schema, formats aside; of xgrammar's 320 one broke a pattern and one was no
JSON, and five of some 70 hostile rules took it more than 30 s. xgrammar fills masks faster:
2.3 µs (p99 57) against 3.4 µs (p99 275).
"""

import json
import math
import time
from collections.abc import Collection, Sequence
from decimal import Decimal
from typing import cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import InvalidArgumentError
from shared.types import StructuredOutput, StructureKind
from worker.step import Int32Array
from worker.structured.contract import Matcher
from worker.structured.gbnf import GrammarError, lark_literal, lark_of_gbnf

_FIELDS = {
    StructureKind.JSON_SCHEMA: "structured_output.json_schema",
    StructureKind.JSON_OBJECT: "structured_output.json_object",
    StructureKind.REGEX: "structured_output.regex",
    StructureKind.GRAMMAR: "structured_output.grammar",
    StructureKind.CHOICE: "structured_output.choice",
}
# Between two tokens of JSON. Bounded: a model that is unsure falls into endless white space.
_JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# The one thing whose compilation no limit of the library bounds: divisibility takes a state
# for each remainder, so 0.4 s for 99,991 and half a minute for ten times that.
_MOST_REMAINDERS = 20_000
# The library tells no sizes. Measured, a compiled rule of much text has up to 360 bytes for each
# of its bytes; a short one can be large too (48 MB for 27 characters), but takes long to
# compile then: 350 MB for each second of a thread, or fewer. The limits below stop it there.
_BYTES_PER_TEXT_BYTE = 400
_BYTES_PER_S = 400e6
_MOST_BYTES_BY_TIME = 64_000_000
# Of what the library says about a rule, which may quote all of it.
_MOST_MESSAGE_CHARS = 500
# Words by which the library says that a limit below was reached, not that it erred.
_LIMIT_WORDS = ("too many", "too big", "too large", "max is", "fuel")


def _limits() -> LLParserLimits:
    """Of one rule: about a second to compile, tens of milliseconds and megabytes to follow.

    Ordinary schemas need less than a tenth of any of them.
    """
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


class LLGuidance:
    """A GrammarLibrary over a tokenizer.json."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Collection[int], threads: int
    ) -> None:
        """Ids of the model that the tokenizer does not know are never allowed.

        `threads` work on matchers side by side. Raises ValueError for a tokenizer that the library
        cannot take, or one with more ids than `vocab_size`.
        """
        self._tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
        )
        self._threads = threads
        self._executor = LLExecutor(num_threads=threads) if threads > 1 else None
        self._vocab_size = vocab_size

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def mask_words(self) -> int:
        return -(-self._vocab_size // 32)

    def compile(self, structure: StructuredOutput) -> "LLRule":
        field = _FIELDS[structure.kind]
        began_s = time.thread_time()
        try:
            grammar = _grammar_of(structure)
        except (ValueError, GrammarError, RecursionError) as error:
            raise InvalidArgumentError(field, _brief(str(error))) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            # Much of the work is done, and some faults show, with the first mask.
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                matcher = first
        if matcher.is_error():
            raise InvalidArgumentError(field, _brief(matcher.get_error()))
        return LLRule(matcher, _bytes_of(grammar, time.thread_time() - began_s))

    def accept(self, tokens: Sequence[tuple[Matcher, int]]) -> list[int]:
        pairs = _inner(tokens)
        executor = self._executor_for(tokens)
        # Either way the library catches a panic, and makes it that matcher's fault.
        if executor is not None:
            are_sound = executor.consume_token_par(pairs)
        else:
            are_sound = [inner.consume_token(token_id) for inner, token_id in pairs]
        return [i for i, is_sound in enumerate(are_sound) if not is_sound]

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bitmasks: Int32Array) -> list[int]:
        row_bytes = bitmasks.strides[0]
        address = bitmasks.ctypes.data
        pairs = _inner(matchers)
        executor = self._executor_for(matchers)
        if executor is not None:
            executor.unsafe_compute_mask_ptr(pairs, address, row_bytes, len(bitmasks))
        else:
            for inner, row in pairs:
                inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        return [i for i, (inner, _) in enumerate(pairs) if inner.is_error()]

    def _executor_for(self, matchers: Sequence[tuple[Matcher, int]]) -> LLExecutor | None:
        """None where this thread alone is faster: matchers of one compilation share a lock, so
        that two threads took 1.1 to 1.5 times as long for 128 of them, and 1.3 times the work."""
        ours = _ours(matchers)
        if self._executor is None or not ours:
            return None
        rule = ours[0][0].rule
        return self._executor if any(one.rule is not rule for one, _ in ours) else None


class LLRule:
    """A compiled rule."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def matcher(self) -> "LLMatch":
        return LLMatch(self, self._matcher.deep_copy())


class LLMatch:
    """A matcher; what it holds is for the library alone."""

    def __init__(self, rule: LLRule, inner: LLMatcher) -> None:
        self.rule = rule
        self.inner = inner

    def accept(self, token_id: int) -> bool:
        return self.inner.consume_token(token_id)

    def fault(self) -> tuple[str, bool] | None:
        if not self.inner.is_error():
            return None
        message = self.inner.get_error()
        lowered = message.lower()
        return _brief(message), any(word in lowered for word in _LIMIT_WORDS)


def _ours(matchers: Sequence[tuple[Matcher, int]]) -> Sequence[tuple[LLMatch, int]]:
    # One cast for all, because a call for each would take as long as all the rest.
    return cast(Sequence[tuple[LLMatch, int]], matchers)


def _inner(matchers: Sequence[tuple[Matcher, int]]) -> list[tuple[LLMatcher, int]]:
    return [(matcher.inner, number) for matcher, number in _ours(matchers)]


def _grammar_of(structure: StructuredOutput) -> str:
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            # Parsed here, for the library would put the text as it is into a larger one.
            schema = json.loads(structure.text)
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            if not isinstance(schema, dict):
                raise ValueError("a schema is a JSON object")
            _check_remainders(schema)
            return _json(schema)
        case StructureKind.JSON_OBJECT:
            return _json({"type": "object"})
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(structure.text)
        case StructureKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(lark_of_gbnf(structure.text))
        case StructureKind.CHOICE:
            choices = " | ".join(map(lark_literal, dict.fromkeys(structure.choices)))
            return LLMatcher.grammar_from_lark(f"start: {choices}")


def _bytes_of(grammar: str, compile_s: float) -> int:
    by_time = min(_MOST_BYTES_BY_TIME, compile_s * _BYTES_PER_S)
    return int(max(by_time, _BYTES_PER_TEXT_BYTE * len(grammar.encode())))


def _json(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_pattern": _JSON_SPACE}
    )


def _check_remainders(schema: dict[str, object]) -> None:
    """All factors together, for they may have to hold at once."""
    factors: set[int] = set()
    stack: list[object] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            stack += node.values()
            factor = node.get("multipleOf")
            if isinstance(factor, bool) or not isinstance(factor, int | float):
                continue
            if math.isfinite(factor):
                digits = Decimal(repr(factor)).normalize().as_tuple().digits
                factors.add(int("".join(map(str, digits))))
    if math.prod(factors) > _MOST_REMAINDERS:
        raise ValueError(
            f"multipleOf: the factors {sorted(factors)} make more than {_MOST_REMAINDERS} "
            "remainders, which is the limit"
        )


def _brief(message: str) -> str:
    """What the library says, without its state and without the source that it quotes."""
    for begin in ("\n<state>", "\n<non-verbose", "\n<grammar>", "\n   1 |"):
        message = message.partition(begin)[0]
    message = message.rpartition("(in regex): ")[2].strip()
    if message.startswith("NoExtension"):
        message = "no text can satisfy it"
    if len(message) > _MOST_MESSAGE_CHARS:
        message = message[:_MOST_MESSAGE_CHARS] + "…"
    return message
