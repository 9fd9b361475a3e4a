"""Each kind of rule: what it lets through, when it ends, and how a bad one is refused."""

import json

import numpy as np
import pytest

from shared.errors import InvalidArgumentError
from shared.types import StructuredOutput, StructureKind
from tests.gateway.synthetic_tokenizers import metaspace_files
from tests.worker.structured.vocabulary import (
    EOS_IDS,
    VOCAB_SIZE,
    allowed,
    encode,
    ids_of,
    library,
    tokenizer,
)
from worker.structured.library import LLGuidance

GRAMMARS = library()

JSON_GBNF = r"""
# JSON, as grammars of this kind are written
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def structure(kind: StructureKind, text: str = "", *choices: str) -> StructuredOutput:
    return StructuredOutput(kind, text, choices)


def schema(value: object) -> StructuredOutput:
    return structure(StructureKind.JSON_SCHEMA, json.dumps(value))


def grammar(text: str) -> StructuredOutput:
    return structure(StructureKind.GRAMMAR, text)


def regex(text: str) -> StructuredOutput:
    return structure(StructureKind.REGEX, text)


def accepts(rule: StructuredOutput, text: str, grammars: LLGuidance = GRAMMARS) -> bool:
    """Whether the text, token by token, is allowed and may then end."""
    matcher = grammars.compile(rule).matcher()
    for token_id in encode(text):
        if token_id not in allowed(grammars, matcher):
            return False
        matcher.accept(token_id)
        assert matcher.fault() is None
    return bool(allowed(grammars, matcher) & set(EOS_IDS))


ACCEPTED = {
    "object": (schema({"type": "object"}), '{"a": [1, {"b": null}], "é": -2.5e3}'),
    "pretty object": (schema({"type": "object"}), '{\n    "a": 1,\n    "b": {}\n}'),
    "schema": (schema({"properties": {"n": {"type": "integer"}}, "required": ["n"]}), '{"n":12}'),
    "any value": (schema(True), "[1,2]"),
    "json object": (structure(StructureKind.JSON_OBJECT), '{"k":"v"}'),
    "empty object": (structure(StructureKind.JSON_OBJECT), "{}"),
    "regex": (regex(r"\d{3}-(ab|cd)+"), "123-abcdab"),
    "anchored regex": (regex("^ab$"), "ab"),
    "regex of unicode": (regex(r"[^a]\w"), "日é"),
    "empty regex": (regex(""), ""),
    "first choice": (structure(StructureKind.CHOICE, "", "a", "ab", "abc"), "a"),
    "longer choice": (structure(StructureKind.CHOICE, "", "a", "ab", "abc"), "abc"),
    "odd choice": (structure(StructureKind.CHOICE, "", 'é/"\\\n\x00', "x"), 'é/"\\\n\x00'),
    "empty choice": (structure(StructureKind.CHOICE, "", "", "x"), ""),
    "same choice twice": (structure(StructureKind.CHOICE, "", "x", "x"), "x"),
    "grammar of json": (grammar(JSON_GBNF), '{"a": [1, 2.5e3, "x\\n"], "b": {"c": null}}'),
    "grammar of one rule": (grammar('root ::= "a" [b-d]* .'), "abdcé"),
    "grammar whose terminals overlap": (
        grammar('root ::= "ab" "x" | [a-z] [a-z] "y" | "(" root ")"'),
        "((aby))",
    ),
    "grammar that leans left": (grammar('root ::= root "a" | "b"'), "baaa"),
    "grammar with repetitions": (grammar('root ::= (("a"{1,2} "b"?){2}){2}'), "aabaabaa"),
    "grammar with escapes": (grammar(r'root ::= "\x41\u00e9\n" [\]\-^]'), "Aé\n^"),
    "grammar over lines": (
        grammar('# comment\nroot ::= "a" # one\n  | b\nb-2 ::= "c"\nb ::= b-2'),
        "c",
    ),
}

REFUSED_TEXTS = {
    "other type": (schema({"type": "object"}), "[1]"),
    "missing property": (schema({"properties": {"n": {}}, "required": ["n"]}), "{}"),
    "array for an object": (structure(StructureKind.JSON_OBJECT), "[]"),
    "text after json": (structure(StructureKind.JSON_OBJECT), "{} {}"),
    "half a match": (regex("ab+"), "a"),
    "more than a match": (regex("ab"), "abb"),
    "no choice": (structure(StructureKind.CHOICE, "", "ab", "abc"), "a"),
    "unfinished grammar": (grammar(JSON_GBNF), '{"a": [1'),
    "text of an eos token": (regex(".*"), "</s>x"),
}

BAD_RULES = {
    "json_schema": [
        '{"type":',
        "[1]",
        '{"type":"strin"}',
        "false",
        "false",
        '{"type":"array","uniqueItems":true}',
        '{"multipleOf":true}',
        '{"$ref":"#/nowhere"}',
        '{"$ref":"http://example.com/schema.json"}',
        '{"$ref":"#"}',
        '{"minimum":2,"maximum":1,"type":"integer"}',
    ],
    "regex": ["([", "a{2", "(?=a)b", r"(a)\1", r"[^\x00-\U0010ffff]"],
    "grammar": [
        "",
        'main ::= "a"',
        "root ::= other",
        "root ::= root",
        'root ::= "a',
        "root ::= [a",
        "root ::= []",
        "root ::= [z-a]",
        'root ::= ("a"',
        'root ::= "a")',
        'root = "a"',
        'root ::= "a"{2,1}',
        'root ::= "a"{x}',
        'root ::= "a"{99999999}',
        'root ::= "\\q"',
        'root ::= "\\ud800"',
        'root ::= "a"\nroot ::= "b"',
        "%%% \x00",
    ],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_text_that_obeys_its_rule_is_allowed_and_may_end(name: str) -> None:
    assert accepts(*ACCEPTED[name])


@pytest.mark.parametrize("name", REFUSED_TEXTS)
def test_a_text_against_its_rule_is_not(name: str) -> None:
    assert not accepts(*REFUSED_TEXTS[name])


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in BAD_RULES.items() for text in texts]
)
def test_a_bad_rule_is_refused_naming_its_field(kind: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        GRAMMARS.compile(structure(StructureKind[kind.upper()], text))
    assert refusal.value.field == f"structured_output.{kind}"
    assert len(refusal.value.message) < 1000


def test_an_error_in_a_grammar_says_where_it_is() -> None:
    with pytest.raises(InvalidArgumentError, match=r"line 2, column 9: rule b is not defined"):
        GRAMMARS.compile(grammar("root ::= a\na ::= ( b )"))


def test_an_error_in_a_regex_is_said_without_what_it_was_made_into() -> None:
    with pytest.raises(InvalidArgumentError, match="unclosed character class") as refusal:
        GRAMMARS.compile(regex("(["))
    assert "start:" not in refusal.value.message


def test_a_complete_rule_leaves_the_eos_ids_alone() -> None:
    matcher = GRAMMARS.compile(regex("ab")).matcher()
    for token_id in encode("ab"):
        assert not allowed(GRAMMARS, matcher) & set(EOS_IDS)
        matcher.accept(token_id)
    assert allowed(GRAMMARS, matcher) == set(EOS_IDS)


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed() -> None:
    matcher = GRAMMARS.compile(regex("(?s:.)*")).matcher()
    ids = allowed(GRAMMARS, matcher)
    assert len(ids) > 256
    assert max(ids) < VOCAB_SIZE - 64


def test_matchers_of_a_rule_do_not_know_of_each_other() -> None:
    compiled = GRAMMARS.compile(regex("ab|cd"))
    first, second = compiled.matcher(), compiled.matcher()
    before = allowed(GRAMMARS, second)
    first.accept(encode("a")[0])
    assert allowed(GRAMMARS, second) == before != allowed(GRAMMARS, first)


def test_a_token_that_was_not_allowed_is_a_fault_of_ours() -> None:
    matcher = GRAMMARS.compile(regex("ab")).matcher()
    assert matcher.fault() is None
    matcher.accept(encode("x")[0])
    fault = matcher.fault()
    assert fault is not None and not fault[1]


def test_masks_are_the_same_filled_side_by_side() -> None:
    rules = [regex(f"(a|b){{{i}}}c") for i in range(1, 20)] + [schema({"type": "object"})]
    masks = []
    for threads in (1, 3):
        grammars = library(threads=threads)
        matchers = [(grammars.compile(rule).matcher(), i) for i, rule in enumerate(rules)]
        bitmasks = np.zeros((len(rules), grammars.mask_words), np.int32)
        grammars.fill(matchers, bitmasks)
        masks.append(bitmasks)
    assert np.array_equal(masks[0], masks[1])


@pytest.mark.parametrize("texts", [["(a|b){3}|c+"], ["(a|b){3}|c+", "(a|b){2}|c+"]], ids=len)
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_accepted_together_are_each_ones_own(threads: int, texts: list[str]) -> None:
    grammars = library(threads=threads)
    rules = [grammars.compile(regex(text)) for text in texts]
    tokens = [encode(letter)[0] for letter in "abxc" * 5]
    matchers = [rules[i % len(rules)].matcher() for i in range(len(tokens))]
    faulty = grammars.accept(list(zip(matchers, tokens, strict=True)))
    assert faulty == list(range(2, 20, 4))
    assert [i for i, matcher in enumerate(matchers) if matcher.fault()] == faulty
    bitmasks = np.zeros((len(tokens), grammars.mask_words), np.int32)
    assert grammars.fill([(one, i) for i, one in enumerate(matchers)], bitmasks) == faulty
    for i, token_id in enumerate(tokens):
        if i not in faulty:
            alone = rules[i % len(rules)].matcher()
            assert alone.accept(token_id)
            assert ids_of(bitmasks[i]) == allowed(grammars, alone)


def test_a_tokenizer_that_is_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab"):
        LLGuidance(tokenizer().to_str(), vocab_size=100, eos_token_ids=[1], threads=1)


def test_a_metaspace_vocabulary_with_bytes_is_understood() -> None:
    tokenizer_json = metaspace_files()["tokenizer.json"].decode()
    ids = json.loads(tokenizer_json)["model"]["vocab"]
    grammars = LLGuidance(tokenizer_json, vocab_size=len(ids), eos_token_ids=[2], threads=1)
    matcher = grammars.compile(regex("ab é(世|😀)")).matcher()
    for token in ("a", "b", "▁", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"):
        assert ids[token] in allowed(grammars, matcher)
        matcher.accept(ids[token])
    assert allowed(grammars, matcher) == {2}
