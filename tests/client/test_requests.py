"""Options become the fields of the contract that have their names, and nothing gets lost."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import Message as ProtoMessage

from shared.pb.tandem.v1 import inference_pb2 as pb
from tandem_client import (
    Delta,
    FieldViolation,
    Finished,
    GenerateOptions,
    InvalidArgumentError,
    Load,
    Message,
    Model,
    Started,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Usage,
    WorkerLoad,
)
from tandem_client.requests import generate_request, tokenize_request

# Fields that options and prompts have another name for.
RENAMED = {"template_kwargs_json": "template_kwargs", "tools_json": "tools"}
PROMPTS = {"text", "token_ids", "messages"}


def leaves(descriptor: Any) -> Iterator[str]:
    """Names of the fields that a message and its parts have in the end."""
    for field in descriptor.fields:
        if field.name in PROMPTS or field.message_type is None:
            yield field.name
        elif field.message_type.GetOptions().map_entry or field.name == "choice":
            yield field.name
        else:
            yield from leaves(field.message_type)


def test_every_field_of_a_request_can_be_asked_for() -> None:
    names = {RENAMED.get(name, name) for name in leaves(pb.GenerateRequest.DESCRIPTOR)}
    assert names - PROMPTS - {"n"} == GenerateOptions.__annotations__.keys()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Started, pb.Started),
        (Delta, pb.Delta),
        (Finished, pb.Finished),
        (Usage, pb.Usage),
        (Timings, pb.Timings),
        (TokenLogprob, pb.TokenLogprob),
        (TokenLogprobs, pb.TokenLogprobs),
        (Model, pb.GetModelResponse),
        (Load, pb.GetLoadResponse),
        (WorkerLoad, pb.WorkerLoad),
    ],
)
def test_every_field_of_an_answer_can_be_read(cls: type, message: type[ProtoMessage]) -> None:
    names = {field.name for field in message.DESCRIPTOR.fields}
    assert {field.name for field in fields(cls)} == names


def request(**options: Any) -> pb.GenerateRequest:
    return generate_request("Hi", "r", 1, options)  # type: ignore[arg-type]


def test_what_is_not_asked_for_is_not_set() -> None:
    assert request() == pb.GenerateRequest(request_id="r", text="Hi")
    assert request(temperature=None, stop_strings=None) == request()


def test_a_zero_is_a_value() -> None:
    made = request(temperature=0, max_tokens=0, logprobs=0, skip_special_tokens=False, seed=0)
    assert made.sampling.HasField("temperature")
    assert made.sampling.HasField("seed")
    assert made.HasField("max_tokens")
    assert made.output.HasField("logprobs")
    assert made.output.HasField("skip_special_tokens")
    assert made.output.skip_special_tokens is False


def test_options_of_every_kind_arrive() -> None:
    made = generate_request(
        [5, 6],
        "r",
        3,
        {
            "priority": -2,
            "logit_bias": {7: -1.5},
            "allowed_token_ids": [7, 8],
            "stop_strings": ("a", "b"),
            "stop_token_ids": range(2),
            "ignore_eos": True,
            "prompt_logprobs": 4,
            "choice": ["yes", "no"],
        },
    )
    assert list(made.token_ids.ids) == [5, 6]
    assert (made.n, made.priority) == (3, -2)
    assert dict(made.sampling.logit_bias) == {7: -1.5}
    assert list(made.sampling.allowed_token_ids) == [7, 8]
    assert list(made.stopping.stop_strings) == ["a", "b"]
    assert list(made.stopping.stop_token_ids) == [0, 1]
    assert made.stopping.ignore_eos
    assert made.output.prompt_logprobs == 4
    assert list(made.structured_output.choice.choices) == ["yes", "no"]


def test_one_stop_string_is_not_taken_apart() -> None:
    assert list(request(stop_strings="END").stopping.stop_strings) == ["END"]


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}'])
def test_a_schema_may_be_text_or_a_mapping(schema: Any) -> None:
    sent = request(json_schema=schema).structured_output.json_schema
    assert json.loads(sent) == {"type": "object"}


def test_a_constraint_that_is_off_is_none() -> None:
    assert request(json_object=False) == request()
    made = request(json_object=False, regex="a+")
    assert made.structured_output.WhichOneof("constraint") == "regex"


def test_a_message_keeps_its_further_fields() -> None:
    calls = [{"name": "f", "arguments": {}}]
    by_mapping = {"role": "assistant", "content": None, "tool_calls": calls}
    by_object = Message("assistant", "", {"tool_calls": calls})
    for message in (by_mapping, by_object):
        made = generate_request([message], "r", 1, {"tools": [{"name": "f"}]}).chat
        assert (made.messages[0].role, made.messages[0].content) == ("assistant", "")
        assert json.loads(made.messages[0].extra_json) == {"tool_calls": calls}
        assert json.loads(made.tools_json) == [{"name": "f"}]


def test_template_options_arrive() -> None:
    chat = generate_request(
        [Message("user", "Hi")],
        "r",
        1,
        {"template_kwargs": {"thinking": False}, "add_generation_prompt": False},
    ).chat
    assert json.loads(chat.template_kwargs_json) == {"thinking": False}
    assert chat.HasField("add_generation_prompt")
    assert chat.messages[0].extra_json == ""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temprature": 1}, TypeError, "unknown option 'temprature'"),
        ({"max_tokens": -1}, ValueError, "max_tokens: "),
        ({"max_tokens": "many"}, TypeError, "max_tokens: "),
        ({"max_tokens": [1]}, TypeError, "max_tokens: "),
        ({"seed": 2**64}, ValueError, "seed: "),
        ({"logit_bias": {-1: 1.0}}, ValueError, "logit_bias: "),
        ({"logit_bias": [1]}, TypeError, "logit_bias: "),
        ({"stop_strings": [1]}, TypeError, "stop_strings: "),
        ({"allowed_token_ids": 1}, TypeError, "allowed_token_ids: "),
        ({"tools": []}, ValueError, "tools: only for prompts that are chats"),
        ({"regex": "a", "grammar": "b"}, ValueError, "grammar: cannot go with regex"),
        ({"choice": "yes"}, TypeError, "choice: "),
        ({"json_schema": {"a": {1}}}, TypeError, "json_schema: "),
        ({"json_schema": {"a": float("nan")}}, ValueError, "json_schema: "),
    ],
)
def test_what_no_message_can_hold_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        request(**options)


@pytest.mark.parametrize(
    ("request_id", "error"), [(5, TypeError), (["a"], TypeError), ("\ud800", ValueError)]
)
def test_an_id_that_no_message_can_hold_is_refused_by_name(
    request_id: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="request_id: "):
        generate_request("hi", request_id, 1, {})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"role": "user", "content": "Hi"}, "a chat is a list"),
        (Message("user", "Hi"), "a chat is a list"),
        (b"Hi", "not bytes"),
        (["Hi"], r"messages\[0\]: must be a Message or a mapping, got str"),
        ([{"role": "user", "content": ["Hi"]}], r"messages\[0\]\.content: "),
        ([{"role": "user", "content": "Hi", "x": {1}}], r"messages\[0\]: cannot be written"),
        ([1, "a"], "prompt: "),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        generate_request(prompt, "r", 1, {})


def test_only_text_can_do_without_special_tokens() -> None:
    assert tokenize_request("Hi", "m", False, {}).HasField("add_special_tokens")
    assert not tokenize_request("Hi", "m", None, {}).HasField("add_special_tokens")
    with pytest.raises(ValueError, match="add_special_tokens"):
        tokenize_request([Message("user", "Hi")], "", True, {})
    with pytest.raises(TypeError, match="token ids already"):
        tokenize_request([1], "", None, {})  # type: ignore[list-item]


def test_an_error_can_be_sent_to_another_process() -> None:
    error = InvalidArgumentError("no", violations=(FieldViolation("n", "no"),))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (InvalidArgumentError, "INVALID_ARGUMENT: no")
    assert copy.violations == error.violations
