"""Rules made to hang, crash or exhaust the engine process: each is refused or stays cheap."""

import json
import time

import numpy as np
import pytest

from shared.errors import Code, InvalidArgumentError, ServingError
from shared.types import StructuredOutput, StructureKind
from tests.worker.structured.vocabulary import EOS_IDS, encode, ids_of, library
from worker.structured.outputs import StructuredOutputs

GRAMMARS = library(threads=2)
# On a machine that does other things beside; the longest takes half a second.
MOST_COMPILE_S = 10.0
MOST_STEPS_S = 10.0
NUM_STEPS = 60
UID, MATE_UID = 1, 2
(A,) = encode("a")


def schema(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, text)


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.REGEX, text)


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.GRAMMAR, text)


def doubling(last: str, rule: str) -> str:
    """39 rules, each of twice the one before."""
    rules = [rule.format(i=i, before=i - 1) for i in range(1, 40)]
    return "\n".join(["root ::= a39", *rules, f"a0 ::= {last}"])


RULES = {
    "deep schema": schema('{"items":' * 2000 + "true" + "}" * 2000),
    "deeper than Python's JSON": schema("[" * 30000 + "]" * 30000),
    "deep constant": schema('{"enum":[' + "[" * 900 + "]" * 900 + "]}"),
    "a number of 30,000 digits": schema('{"type":"number","minimum":1' + "0" * 30000 + "}"),
    "a billion items": schema('{"type":"array","minItems":1000000000}'),
    "a billion characters": schema('{"type":"string","minLength":1000000000}'),
    "a large factor": schema('{"type":"integer","multipleOf":99991}'),
    "a larger factor": schema('{"type":"integer","multipleOf":1000003}'),
    "factors that multiply": schema(
        json.dumps({"allOf": [{"multipleOf": factor} for factor in (997, 991, 0.983)]})
    ),
    "an endless factor": schema('{"multipleOf":1e999}'),
    "1,800 properties": schema(
        json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(1800)}})
    ),
    "6,000 values": schema(json.dumps({"enum": [f"v{i}" for i in range(6000)]})),
    "a product of unions": schema(
        json.dumps({"allOf": [{"anyOf": [{"minLength": j} for j in range(3)]} for _ in range(14)]})
    ),
    "references to themselves": schema('{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "repetitions of repetitions": regex("(((a{100}){100}){100}){100}"),
    "a billion repetitions": regex("a{1000000000}"),
    "a regex that backtracking cannot match": regex("(a+)+(a|aa)+b"),
    "a regex of 2^200 states": regex(".*a.{200}b"),
    "a regex of many more": regex("(.*[a-m].{60}[n-z]){5}"),
    "60,000 characters": regex("ab[c-e]" * 8700),
    "20,000 parentheses": regex("(" * 20000 + "a" + ")" * 20000),
    "parentheses in a grammar": grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "stars in a grammar": grammar('root ::= "a"' + "*" * 50000),
    "a grammar of 2^39 characters": grammar(doubling('"a"', "a{i} ::= a{before} a{before}")),
    "a grammar of nothing": grammar(doubling('""', 'a{i} ::= a{before} a{before} | ""')),
    "an ambiguous grammar": grammar('root ::= s\ns ::= s s | "a" | ""'),
    "a more ambiguous grammar": grammar('root ::= s\ns ::= s s s | s s | [a-z] | ""'),
    "repeated nothing": grammar('root ::= ("" | "a"*)*'),
    "2,500 rules": grammar(
        "root ::= " + " | ".join(f"r{i}" for i in range(2500)) + "\n"
        + "\n".join(f"r{i} ::= root? [a-z]" for i in range(2500))
    ),
    "a choice of 60,000 characters": StructuredOutput(
        StructureKind.CHOICE, choices=("x" * 60000,)
    ),
    "1,024 choices": StructuredOutput(
        StructureKind.CHOICE, choices=tuple(f"choice number {i}" for i in range(1024))
    ),
}  # fmt: skip


class Completion:
    """One request that obeys a rule, its tokens drawn at random from the masks; beside it
    another, of a simple rule."""

    def __init__(self, structure: StructuredOutput) -> None:
        self.outputs = StructuredOutputs(
            GRAMMARS, cache_entries=4, timeout_s=60.0, max_rows=2, wake=lambda: None
        )
        self._rng = np.random.default_rng(0)
        waiting = {UID, MATE_UID}
        for uid, rule in ((UID, structure), (MATE_UID, regex("a*"))):
            assert not self.outputs.begin(uid, rule, 0.0)
        while waiting:
            waiting -= {uid for uid, error in self.outputs.take_ready(0.0) if not error}

    def run(self, num_steps: int) -> ServingError | None:
        """The fault that ended it, if one did; otherwise it is as far as it can be."""
        for _ in range(num_steps):
            bitmasks, faults = self.outputs.fill([UID, MATE_UID])
            assert ids_of(bitmasks[1]) >= {A, *EOS_IDS}
            if not faults:
                ids = ids_of(bitmasks[0])
                # As long as it can go on, it does.
                ids = ids - set(EOS_IDS) or ids
                token_id = int(self._rng.choice(sorted(ids)))
                if token_id in EOS_IDS:
                    return None
                faults = self.outputs.accept([(UID, token_id), (MATE_UID, A)])
            if faults:
                ((uid, error),) = faults
                assert uid == UID
                return error
        return None


@pytest.mark.parametrize("name", RULES)
def test_a_hostile_rule_is_refused_or_followed_in_bounded_time(name: str) -> None:
    began_at = time.monotonic()
    try:
        GRAMMARS.compile(RULES[name])
    except InvalidArgumentError as error:
        assert len(error.message) < 1000
        return
    finally:
        assert time.monotonic() - began_at < MOST_COMPILE_S
    completion = Completion(RULES[name])
    began_at = time.monotonic()
    fault = completion.run(NUM_STEPS)
    assert time.monotonic() - began_at < MOST_STEPS_S
    assert fault is None or fault.code is Code.INVALID_ARGUMENT
    completion.outputs.close()
