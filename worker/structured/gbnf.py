"""GBNF, the grammar notation of llama.cpp, to Lark's, which the grammar library reads.

A rule that no recursion reaches is regular, and becomes a terminal: the library matches it as
one piece, by an automaton, which is what makes strings and numbers cheap. A terminal is
matched as a lexer does it, the longest first, so a grammar in which a shorter match would be
wanted allows less than it says; it never allows more. All other rules are followed character
by character, and exactly.

GBNF: `name ::= …` defines a rule, `root` is where it starts; "text", [a-z], [^a-z], . and
(…) stand for themselves; | separates alternatives; * + ? {m} {m,} {m,n} repeat; # comments.
"""

from collections.abc import Callable
from dataclasses import dataclass

_ROOT = "root"
_MOST_DEPTH = 100
_MOST_REPEATS = 1_000_000
_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "\\": "\\",
    '"': '"',
    "[": "[",
    "]": "]",
    "-": "-",
    "^": "^",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class GrammarError(Exception):
    """The grammar is malformed; says where."""


@dataclass(frozen=True, slots=True)
class Text:
    """Characters as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character in, or not in, the ranges."""

    ranges: tuple[tuple[str, str], ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; nothing, if there are none."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """The item `least` to `most` times; None: without end."""

    item: "Node"
    least: int
    most: int | None


Node = Text | OneOf | Reference | Sequence | Choice | Repeat

_ANY = OneOf((), is_negated=True)


def lark_of_gbnf(grammar: str) -> str:
    """The same language in Lark. Raises GrammarError."""
    rules = _Parser(grammar).rules()
    return _Writer(rules).lark()


def lark_literal(text: str) -> str:
    """A Lark terminal that matches the text, whatever is in it."""
    return f"/{''.join(map(_escaped, text))}/" if text else '""'


class _Parser:
    """Reads the rules; remembers where it is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip_space()
        while self._at < len(self._text):
            begin = self._at
            name = self._name()
            self._skip_space()
            self._expect("::=")
            if name in rules:
                raise self._error(f"rule {name} is defined twice", begin)
            self._skip_space()
            rules[name] = self._choice()
            self._skip_space()
        if _ROOT not in rules:
            raise GrammarError(f"there is no rule named {_ROOT}, with which a grammar starts")
        for node in list(rules.values()):
            self._check_references(node, rules)
        return rules

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._error(f"parentheses are nested more than {_MOST_DEPTH} deep")
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            self._skip_space()
            item = self._item()
            if item is None:
                return items[0] if len(items) == 1 else Sequence(tuple(items))
            items.append(self._repeated(item))

    def _item(self) -> Node | None:
        """None where a sequence ends."""
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return _ANY
            case "(":
                self._at += 1
                inner = self._choice()
                self._expect(")")
                return inner
            case "" | "|" | ")":
                return None
            case _:
                return self._reference()

    def _reference(self) -> Node | None:
        begin = self._at
        name = self._name()
        end = self._at
        self._skip_space()
        if self._text.startswith("::=", self._at):
            # It is the next rule's.
            self._at = begin
            return None
        self._at = end
        return Reference(name, begin)

    def _repeated(self, item: Node) -> Node:
        for _ in range(_MOST_DEPTH):
            match self._peek():
                case "*":
                    least, most = 0, None
                case "+":
                    least, most = 1, None
                case "?":
                    least, most = 0, 1
                case "{":
                    item = Repeat(item, *self._bounds())
                    continue
                case _:
                    return item
            self._at += 1
            item = Repeat(item, least, most)
        raise self._error(f"more than {_MOST_DEPTH} repetitions of one item")

    def _bounds(self) -> tuple[int, int | None]:
        begin = self._at
        end = self._text.find("}", begin)
        inside = self._text[begin + 1 : end] if end > begin else ""
        first, comma, second = (part.strip() for part in inside.partition(","))
        numbers = [part for part in (first, second) if part]
        if not first or not all(part.isascii() and part.isdigit() for part in numbers):
            raise self._error("a repetition is written {m}, {m,} or {m,n}", begin)
        if any(len(part) > 7 or int(part) > _MOST_REPEATS for part in numbers):
            raise self._error(f"a repetition is at most {_MOST_REPEATS} times", begin)
        least = int(first)
        most = None if comma and not second else int(second or first)
        if most is not None and most < least:
            raise self._error(f"a repetition of at least {least} and at most {most}", begin)
        self._at = end + 1
        return least, most

    def _literal(self) -> Node:
        begin = self._at
        self._at += 1
        characters = []
        while self._peek() != '"':
            characters.append(self._character(begin, "a text"))
        self._at += 1
        return Text("".join(characters))

    def _class(self) -> Node:
        begin = self._at
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges = []
        while self._peek() != "]":
            first = last = self._character(begin, "a character class")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._character(begin, "a character class")
            if last < first:
                raise self._error(f"the range {first!r} to {last!r} is empty", begin)
            ranges.append((first, last))
        self._at += 1
        if not ranges and not is_negated:
            raise self._error("a character class holds nothing", begin)
        return OneOf(tuple(ranges), is_negated)

    def _character(self, begin: int, what: str) -> str:
        character = self._peek()
        if character in ("", "\n"):
            raise self._error(f"{what} is not closed", begin)
        self._at += 1
        if character != "\\":
            return character
        kind = self._peek()
        self._at += 1
        if kind in _HEX_DIGITS:
            return self._code_point(_HEX_DIGITS[kind])
        if kind not in _ESCAPES:
            raise self._error(f"\\{kind} is no escape", self._at - 2)
        return _ESCAPES[kind]

    def _code_point(self, num_digits: int) -> str:
        digits = self._text[self._at : self._at + num_digits]
        try:
            character = chr(int(digits, 16))
            character.encode()
        except (ValueError, OverflowError):
            raise self._error(f"{digits!r} is no character's number") from None
        self._at += num_digits
        return character

    def _name(self) -> str:
        begin = self._at
        while (character := self._peek()) and (character.isalnum() or character in "-_"):
            self._at += 1
        if begin == self._at:
            raise self._error(f"expected a rule's name, found {self._peek()!r}")
        return self._text[begin : self._at]

    def _check_references(self, node: Node, rules: dict[str, Node]) -> None:
        match node:
            case Reference(name, at) if name not in rules:
                raise self._error(f"rule {name} is not defined", at)
            case Sequence(parts) | Choice(parts):
                for part in parts:
                    self._check_references(part, rules)
            case Repeat(item):
                self._check_references(item, rules)

    def _skip_space(self) -> None:
        while (character := self._peek()) and (character.isspace() or character == "#"):
            end = self._text.find("\n", self._at) if character == "#" else self._at
            self._at = len(self._text) if end < 0 else end + 1

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(f"expected {text}, found {self._peek()!r}")
        self._at += len(text)

    def _error(self, message: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return GrammarError(f"line {line}, column {column}: {message}")


class _Writer:
    """Writes the rules that the root needs."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._recursive = _reaching_recursion(rules)
        numbers = {name: i for i, name in enumerate(rules)}
        self._names = {
            name: f"rule_{i}" if name in self._recursive else f"TERM_{i}"
            for name, i in numbers.items()
        }

    def lark(self) -> str:
        lines = [f"start: {self._names[_ROOT]}"]
        for name, node in self._rules.items():
            write = self._in_rule if name in self._recursive else self._in_terminal
            lines.append(f"{self._names[name]}: {write(node)}")
        return "\n".join(lines)

    def _in_rule(self, node: Node) -> str:
        """Each character is a terminal of its own, so that nothing is matched too far."""
        if isinstance(node, Text):
            return f"({' '.join(map(lark_literal, node.text))})" if node.text else '""'
        return self._composed(node, self._in_rule)

    def _in_terminal(self, node: Node) -> str:
        if isinstance(node, Text):
            return lark_literal(node.text)
        return self._composed(node, self._in_terminal)

    def _composed(self, node: Node, write: Callable[[Node], str]) -> str:
        match node:
            case OneOf(ranges, is_negated):
                return _class(ranges, is_negated=is_negated)
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return f"({' '.join(map(write, items))})" if items else '""'
            case Choice(options):
                return f"({' | '.join(map(write, options))})"
            case Repeat(item, least, most):
                return f"({write(item)}){_repetition(least, most)}"
            case _:
                raise AssertionError(node)


def _repetition(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _class(ranges: tuple[tuple[str, str], ...], *, is_negated: bool) -> str:
    if not ranges:
        return "/(?s:.)/"
    inside = "".join(
        _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"
        for first, last in ranges
    )
    return f"/[{'^' if is_negated else ''}{inside}]/"


def _escaped(character: str) -> str:
    """A character within a regular expression between slashes."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def _reaching_recursion(rules: dict[str, Node]) -> set[str]:
    """Names of the rules from which a cycle can be reached."""
    references = {name: _references(node) for name, node in rules.items()}
    # What remains when rules that need no remaining one are taken away again and again.
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in references.items():
        for other in used:
            users[other].append(name)
    missing = {name: len(used) for name, used in references.items()}
    regular = [name for name, count in missing.items() if not count]
    for name in regular:
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                regular.append(user)
    return set(rules) - set(regular)


def _references(node: Node) -> set[str]:
    match node:
        case Reference(name):
            return {name}
        case Sequence(parts) | Choice(parts):
            return set().union(*map(_references, parts))
        case Repeat(item):
            return _references(item)
        case _:
            return set()
