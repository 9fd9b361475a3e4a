"""Public requests to checked internal ones. Every refusal names the field at fault."""

import json
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from gateway.option_checks import (
    or_default,
    output_options,
    sampling_params,
    stop_rules,
    structured_output,
)
from gateway.request import ChatPrompt, GenerationRequest, Prompt, TextPrompt, TokenPrompt
from shared.errors import InvalidArgumentError
from shared.limits import MAX_COMPLETIONS, MAX_REQUEST_ID_BYTES
from shared.pb.tandem.v1 import inference_pb2 as pb

MAX_CACHE_SALT_BYTES = 256
# More than any context that is served. Python reads a million in some 40 ms.
MAX_TOKEN_IDS = 1 << 20
MAX_CHAT_MESSAGES = 1 << 14
# Of one chat, in characters. It is parsed on the event loop; at worst this much takes 0.1 s.
MAX_JSON_CHARS = 1 << 20

_JsonT = TypeVar("_JsonT", list[Any], dict[str, Any])


def generation_request(
    request: pb.GenerateRequest, request_id: str, traceparent: str = "", *, is_unary: bool = False
) -> GenerationRequest:
    """Checks what can be checked without the model. Raises InvalidArgumentError."""
    if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidArgumentError(
            "cache_salt",
            f"at most {MAX_CACHE_SALT_BYTES} bytes, got {len(request.cache_salt.encode())}",
        )
    num_completions = or_default(request, "n", 1)
    if not 1 <= num_completions <= MAX_COMPLETIONS:
        raise InvalidArgumentError(
            "n", f"must be from 1 to {MAX_COMPLETIONS}, got {num_completions}"
        )
    return GenerationRequest(
        request_id=request_id,
        model=request.model,
        prompt=_prompt(request),
        max_tokens=_positive(request, "max_tokens"),
        sampling=sampling_params(request.sampling),
        stop=stop_rules(request.stopping),
        output=output_options(request.output),
        structured_output=structured_output(request),
        num_completions=num_completions,
        is_unary=is_unary,
        truncate_prompt_tokens=_positive(request, "truncate_prompt_tokens"),
        priority=request.priority,
        cache_salt=request.cache_salt,
        time_limit_ms=_positive(request, "time_limit_ms") or 0,
        traceparent=traceparent,
    )


def checked_request_id(request_id: str) -> str:
    """The client's id, or one of ours where it has none."""
    if not request_id:
        return secrets.token_hex(16)
    if len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(
            "request_id", f"at most {MAX_REQUEST_ID_BYTES} bytes, got {len(request_id.encode())}"
        )
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgumentError("request_id", "only printable ASCII characters are allowed")
    return request_id


def chat_prompt(chat: pb.ChatPrompt, field: str = "chat") -> ChatPrompt:
    """Checks a chat, with everything that comes as JSON parsed."""
    if not chat.messages:
        raise InvalidArgumentError(f"{field}.messages", "must not be empty")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidArgumentError(
            f"{field}.messages", f"at most {MAX_CHAT_MESSAGES}, got {len(chat.messages)}"
        )
    add_generation_prompt = or_default(
        chat, "add_generation_prompt", not chat.continue_final_message
    )
    if add_generation_prompt and chat.continue_final_message:
        raise InvalidArgumentError(
            f"{field}.add_generation_prompt", "cannot go with continue_final_message"
        )
    _check_json_size(chat, field)
    messages = [
        _message(message, f"{field}.messages[{index}]")
        for index, message in enumerate(chat.messages)
    ]
    tools, variables = chat.tools_json, chat.template_kwargs_json
    return ChatPrompt(
        messages=messages,
        tools=_json(tools, list, f"{field}.tools_json") if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        variables=_json(variables, dict, f"{field}.template_kwargs_json") if variables else {},
        field=field,
    )


def checked_token_ids(token_ids: Sequence[int], field: str) -> list[int]:
    """The ids, unless there are too many to be looked at on the event loop."""
    if len(token_ids) > MAX_TOKEN_IDS:
        raise InvalidArgumentError(field, f"at most {MAX_TOKEN_IDS} ids, got {len(token_ids)}")
    return list(token_ids)


def _check_json_size(chat: pb.ChatPrompt, field: str) -> None:
    num_chars = len(chat.tools_json) + len(chat.template_kwargs_json)
    num_chars += sum(len(message.extra_json) for message in chat.messages)
    if num_chars > MAX_JSON_CHARS:
        raise InvalidArgumentError(
            field, f"at most {MAX_JSON_CHARS} characters of JSON, got {num_chars}"
        )


def _message(message: pb.ChatMessage, field: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidArgumentError(f"{field}.role", "must not be empty")
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if not message.extra_json:
        return plain
    extra = _json(message.extra_json, dict, f"{field}.extra_json")
    if taken := plain.keys() & extra.keys():
        raise InvalidArgumentError(
            f"{field}.extra_json", f"{sorted(taken)[0]!r} has a field of its own"
        )
    return plain | extra


def _json(text: str, kind: type[_JsonT], field: str) -> _JsonT:
    try:
        value = json.loads(text)
        # JSON can escape half a surrogate pair, which no text can hold.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, f"is no JSON: {error}") from None
    if not isinstance(value, kind):
        wanted = "array" if kind is list else "object"
        raise InvalidArgumentError(field, f"must be a JSON {wanted}")
    return value


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidArgumentError("text", "the prompt is empty")
            return TextPrompt(request.text)
        case "token_ids":
            if not request.token_ids.ids:
                raise InvalidArgumentError("token_ids", "the prompt is empty")
            return TokenPrompt(checked_token_ids(request.token_ids.ids, "token_ids"))
        case "chat":
            return chat_prompt(request.chat)
        case _:
            raise InvalidArgumentError("prompt", "set one of text, token_ids and chat")


def _positive(request: pb.GenerateRequest, name: str) -> int | None:
    if not request.HasField(name):
        return None
    value: int = getattr(request, name)
    if value < 1:
        raise InvalidArgumentError(name, f"must be at least 1, got {value}")
    return value
