"""Prompts and options as messages of the public contract. Pure."""

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from google.protobuf.message import Message as ProtoMessage

from shared.pb.tandem.v1 import inference_pb2 as pb
from tandem_client.options import ChatOptions, GenerateOptions, Message, Prompt

# Options by the message that has a field of the same name.
_REQUEST = (
    "model",
    "max_tokens",
    "time_limit_ms",
    "priority",
    "cache_salt",
    "truncate_prompt_tokens",
)
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "logit_bias",
    "allowed_token_ids",
)
_STOPPING = (
    "stop_strings",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_string",
    "min_tokens",
)
_OUTPUT = ("skip_special_tokens", "logprobs", "prompt_logprobs")
_CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")
_CHAT = ("add_generation_prompt", "continue_final_message", "template_kwargs", "tools")
_KNOWN = frozenset(
    ("request_id", *_REQUEST, *_SAMPLING, *_STOPPING, *_OUTPUT, *_CONSTRAINTS, *_CHAT)
)


def generate_request(
    prompt: Prompt, request_id: str, n: int, options: GenerateOptions
) -> pb.GenerateRequest:
    """Raises TypeError and ValueError, naming the option, for what no message can hold.

    Whether the values make sense is for the server to say.
    """
    given = _given(options, _KNOWN)
    request = pb.GenerateRequest()
    _assign(request, "request_id", request_id)
    if n != 1:
        _assign(request, "n", n)
    _set_prompt(request, prompt, given)
    _assign_all(request, _REQUEST, given)
    _assign_all(request.sampling, _SAMPLING, given)
    if isinstance(given.get("stop_strings"), str):
        given["stop_strings"] = [given["stop_strings"]]
    _assign_all(request.stopping, _STOPPING, given)
    _assign_all(request.output, _OUTPUT, given)
    _set_constraint(request.structured_output, given)
    return request


def tokenize_request(
    prompt: str | Sequence[Message | Mapping[str, Any]],
    model: str,
    add_special_tokens: bool | None,
    options: ChatOptions,
) -> pb.TokenizeRequest:
    """Raises TypeError and ValueError as `generate_request` does."""
    request = pb.TokenizeRequest(model=model)
    if add_special_tokens is not None:
        if not isinstance(prompt, str):
            raise ValueError("add_special_tokens: a chat's template adds its own")
        _assign(request, "add_special_tokens", add_special_tokens)
    _set_prompt(request, prompt, _given(options, frozenset(_CHAT)))
    return request


def _given(options: GenerateOptions | ChatOptions, known: frozenset[str]) -> dict[str, Any]:
    if unknown := options.keys() - known:
        raise TypeError(f"unknown option {min(unknown)!r}")
    return {name: value for name, value in options.items() if value is not None}


def _set_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt, given: Mapping[str, Any]
) -> None:
    if isinstance(prompt, Mapping | Message):
        raise TypeError("prompt: a chat is a list of messages, even of one")
    if isinstance(prompt, bytes | bytearray):
        # They would pass for a list of token ids.
        raise TypeError("prompt: must be text, not bytes")
    if not isinstance(prompt, str) and not (len(prompt) > 0 and isinstance(prompt[0], Integral)):
        _set_chat(request.chat, cast(Sequence[Message | Mapping[str, Any]], prompt), given)
        return
    if for_chats := [name for name in _CHAT if name in given]:
        raise ValueError(f"{for_chats[0]}: only for prompts that are chats")
    if isinstance(prompt, str):
        _assign(request, "text", prompt)
    elif isinstance(request, pb.GenerateRequest):
        _assign(request.token_ids, "ids", prompt, "prompt")
    else:
        raise TypeError("prompt: it is token ids already")


def _set_chat(
    chat: pb.ChatPrompt,
    messages: Sequence[Message | Mapping[str, Any]],
    given: Mapping[str, Any],
) -> None:
    # Set even when there are no messages, so that the server names what is missing.
    chat.SetInParent()
    for place, message in enumerate(messages):
        chat.messages.append(_chat_message(message, f"messages[{place}]"))
    _assign_all(chat, ("add_generation_prompt", "continue_final_message"), given)
    for option, field in (("template_kwargs", "template_kwargs_json"), ("tools", "tools_json")):
        if option in given:
            setattr(chat, field, _json(given[option], option))


def _chat_message(message: Message | Mapping[str, Any], name: str) -> pb.ChatMessage:
    if isinstance(message, Message):
        message = {**message.extra, "role": message.role, "content": message.content}
    if not isinstance(message, Mapping):
        raise TypeError(f"{name}: must be a Message or a mapping, got {type(message).__name__}")
    made = pb.ChatMessage()
    for field in ("role", "content"):
        # None is how some write the content of a message that has tool calls alone.
        if (value := message.get(field)) is not None:
            _assign(made, field, value, f"{name}.{field}")
    if extra := {key: message[key] for key in message if key not in ("role", "content")}:
        made.extra_json = _json(extra, name)
    return made


def _set_constraint(structured: pb.StructuredOutput, given: dict[str, Any]) -> None:
    asked_for = [name for name in _CONSTRAINTS if given.get(name, False) is not False]
    if len(asked_for) > 1:
        raise ValueError(f"{asked_for[1]}: cannot go with {asked_for[0]}")
    for name in asked_for:
        match name, given[name]:
            case "choice", choices:
                if isinstance(choices, str):
                    raise TypeError("choice: must be a list of strings, got one string")
                structured.choice.SetInParent()
                _assign(structured.choice, "choices", choices, name)
            case "json_schema", schema if not isinstance(schema, str):
                structured.json_schema = _json(schema, name)
            case _, value:
                _assign(structured, name, value)


def _assign_all(message: ProtoMessage, names: Sequence[str], given: Mapping[str, Any]) -> None:
    for name in names:
        if name in given:
            _assign(message, name, given[name])


def _assign(message: ProtoMessage, field: str, value: Any, name: str = "") -> None:
    """Sets a field of any kind; protobuf's own errors do not say which one was wrong."""
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            setattr(message, field, value)
        else:
            getattr(message, field).extend(value)
    except (TypeError, ValueError, AttributeError) as error:
        # An attribute is missing where a list came for what holds one value.
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name or field}: {error}") from None


def _json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: cannot be written as JSON: {error}") from None
