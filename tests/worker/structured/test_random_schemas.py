"""Completions of a random model on the CPU engine: what ends by itself obeys its rule."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from shared.types import FinishReason, SamplingParams, StructuredOutput, StructureKind
from tests.worker.structured.model import open_engine, write_model
from tests.worker.structured.run import Outcome, run
from tests.worker.structured.schemas import random_schema
from tests.worker.structured.test_rules import JSON_GBNF
from tests.worker.structured.vocabulary import encode, library
from worker.engine.cpu import CpuEngine
from worker.messages import NewRequest
from worker.structured.library import LLRule

NUM_SCHEMAS = 200
MAX_TOKENS = 320
FIRST_FREE_UID = 1000
GRAMMARS = library()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[CpuEngine]:
    engine = open_engine(folder, max_rows=32)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def mixed(engine: CpuEngine) -> Outcome:
    """All the schemas, and free requests between them, in one batch, side by side."""
    requests = [
        request
        for i in range(NUM_SCHEMAS)
        for request in (schema_request(i), free_request(i))[: 1 + (i % 5 == 0)]
    ]
    return run(engine, library(threads=3), requests)


def schema_request(seed: int) -> NewRequest:
    text = json.dumps(random_schema(seed))
    return request(seed, StructuredOutput(StructureKind.JSON_SCHEMA, text))


def free_request(seed: int) -> NewRequest:
    return request(FIRST_FREE_UID + seed, None, max_tokens=40)


def request(
    uid: int, structure: StructuredOutput | None, *, max_tokens: int = MAX_TOKENS
) -> NewRequest:
    prompt = np.array(encode(f"request number {uid}"), np.int32)
    sampling = SamplingParams(seed=uid)
    return NewRequest(uid, prompt, max_tokens, sampling, structured_output=structure)


def is_prefix(structure: StructuredOutput, token_ids: list[int]) -> bool:
    matcher = GRAMMARS.compile(structure).matcher()
    for token_id in token_ids:
        matcher.accept(token_id)
    return matcher.fault() is None


def test_every_output_of_200_random_schemas_parses_and_validates(mixed: Outcome) -> None:
    num_ended = 0
    for seed in range(NUM_SCHEMAS):
        if mixed.reason(seed) is FinishReason.EOS:
            num_ended += 1
            value = json.loads(mixed.text(seed))
            jsonschema.validate(
                value, random_schema(seed), format_checker=jsonschema.FormatChecker()
            )
        else:
            assert mixed.reason(seed) is FinishReason.LENGTH
            structure = schema_request(seed).structured_output
            assert structure is not None
            assert is_prefix(structure, mixed.token_ids[seed])
    assert num_ended > 0.9 * NUM_SCHEMAS


def test_free_requests_draw_the_same_beside_constrained_ones(
    mixed: Outcome, engine: CpuEngine
) -> None:
    alone = run(engine, GRAMMARS, [free_request(i) for i in range(0, NUM_SCHEMAS, 5)])
    assert len(alone.token_ids) == NUM_SCHEMAS / 5
    for uid, token_ids in alone.token_ids.items():
        assert mixed.token_ids[uid] == token_ids


def test_constrained_requests_draw_the_same_alone(mixed: Outcome, engine: CpuEngine) -> None:
    for seed in range(NUM_SCHEMAS):
        alone = run(engine, GRAMMARS, [schema_request(seed)])
        assert alone.token_ids == {seed: mixed.token_ids[seed]}
        assert alone.reason(seed) is mixed.reason(seed)


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_of_one_rule_draw_the_same_when_it_has_copies(
    engine: CpuEngine, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure = schema_request(4).structured_output
    requests = [request(uid, structure) for uid in range(60)]
    grammars, compiled = library(threads=3), []
    compile_rule = grammars.compile

    def compile_and_count(structure: StructuredOutput) -> LLRule:
        compiled.append(structure)
        return compile_rule(structure)

    monkeypatch.setattr(grammars, "compile", compile_and_count)
    together = run(engine, grammars, requests, overlap=overlap)
    assert len(compiled) == 3
    one_by_one = run(engine, GRAMMARS, requests, overlap=overlap)
    assert together.token_ids == one_by_one.token_ids
    for uid in range(60):
        if together.reason(uid) is FinishReason.EOS:
            jsonschema.validate(json.loads(together.text(uid)), random_schema(4))


def test_the_serial_loop_gives_the_same(mixed: Outcome, engine: CpuEngine) -> None:
    serial = run(engine, GRAMMARS, [schema_request(i) for i in range(48)], overlap=False)
    for seed in range(48):
        assert serial.token_ids[seed] == mixed.token_ids[seed]
        assert serial.reason(seed) is mixed.reason(seed)


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_give_the_same(mixed: Outcome, folder: Path, overlap: bool) -> None:
    engine = open_engine(folder, max_rows=16, num_pages=72)
    crowded = run(engine, GRAMMARS, [schema_request(i) for i in range(32)], overlap=overlap)
    engine.close()
    assert crowded.load.preemptions > 5
    for seed in range(32):
        assert crowded.token_ids[seed] == mixed.token_ids[seed]
        assert crowded.reason(seed) is mixed.reason(seed)


def test_other_kinds_of_rules_are_obeyed_too(engine: CpuEngine) -> None:
    kinds = [
        StructuredOutput(StructureKind.REGEX, r"[a-c]{3,9}-\d{2}"),
        StructuredOutput(StructureKind.CHOICE, choices=("left", "leftmost", "grün")),
        StructuredOutput(StructureKind.GRAMMAR, 'root ::= "(" root ")" | [a-c]{2}'),
        StructuredOutput(StructureKind.GRAMMAR, JSON_GBNF),
        StructuredOutput(StructureKind.JSON_OBJECT),
    ]
    outcome = run(engine, GRAMMARS, [request(i, kinds[i % 5]) for i in range(40)])
    for uid in range(40):
        kind = kinds[uid % 5]
        assert is_prefix(kind, outcome.token_ids[uid])
        if outcome.reason(uid) is not FinishReason.EOS:
            continue
        text = outcome.text(uid)
        match uid % 5:
            case 0:
                assert len(text) <= 12 and text[-3] == "-" and text[-2:].isdigit()
            case 1:
                assert text in kind.choices
            case 2:
                assert text.strip("()").isalpha() and text.count("(") == text.count(")")
            case _:
                assert isinstance(json.loads(text), dict)
    ended = [uid for uid in range(40) if outcome.reason(uid) is FinishReason.EOS]
    assert {uid % 5 for uid in ended} == {0, 1, 2, 3, 4}


def test_a_stop_token_ends_a_constrained_request_as_any_other(engine: CpuEngine) -> None:
    structure = StructuredOutput(StructureKind.REGEX, "x{10}[yz]")
    new = NewRequest(
        1,
        np.array(encode("a"), np.int32),
        20,
        SamplingParams(seed=3),
        stop_token_ids=tuple(encode("y") + encode("z")),
        structured_output=structure,
    )
    outcome = run(engine, GRAMMARS, [new])
    assert outcome.reason(1) is FinishReason.STOP_TOKEN
    assert outcome.text(1) == "x" * 10


def test_constrained_and_greedy_go_together(engine: CpuEngine) -> None:
    structure = StructuredOutput(StructureKind.REGEX, "[ab]{4}")
    new = NewRequest(
        1,
        np.array(encode("a"), np.int32),
        20,
        SamplingParams(temperature=0.0),
        structured_output=structure,
    )
    first, second = (run(engine, GRAMMARS, [new]) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert set(first.text(1)) <= {"a", "b"} and len(first.text(1)) == 4
