"""Public requests to checked internal ones. Every refusal names the field at fault."""

import json
import math
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from gateway.request import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    StopRules,
    TextPrompt,
    TokenPrompt,
)
from shared.errors import InvalidArgumentError, UnimplementedError
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.types import SamplingParams

MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_BYTES = 256
MAX_COMPLETIONS = 8
MAX_LOGPROBS = 20
# More than any context that is served. Python reads a million in some 40 ms.
MAX_TOKEN_IDS = 1 << 20
MAX_CHAT_MESSAGES = 1 << 14
# Of one chat, in characters. It is parsed on the event loop; at worst this much takes 0.1 s.
MAX_JSON_CHARS = 1 << 20
MAX_PENALTY = 2.0

_JsonT = TypeVar("_JsonT", list[Any], dict[str, Any])


def generation_request(
    request: pb.GenerateRequest, request_id: str, traceparent: str = ""
) -> GenerationRequest:
    """Checks what can be checked without the model.

    Raises InvalidArgumentError and, for what is not built, UnimplementedError.
    """
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise InvalidArgumentError("max_tokens", "must be at least 1, got 0")
    if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidArgumentError(
            "cache_salt",
            f"at most {MAX_CACHE_SALT_BYTES} bytes, got {len(request.cache_salt.encode())}",
        )
    checked = GenerationRequest(
        request_id=request_id,
        model=request.model,
        prompt=_prompt(request),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        sampling=_sampling(request.sampling),
        stop=_stop_rules(request.stopping),
        skip_special_tokens=_or_default(request.output, "skip_special_tokens", True),
        priority=request.priority,
        cache_salt=request.cache_salt,
        time_limit_ms=request.time_limit_ms if request.HasField("time_limit_ms") else 0,
        traceparent=traceparent,
    )
    if request.HasField("time_limit_ms") and request.time_limit_ms < 1:
        raise InvalidArgumentError("time_limit_ms", "must be at least 1, got 0")
    _refuse_unbuilt(request)
    return checked


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
    add_generation_prompt = _or_default(
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


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    temperature = _number(params, "temperature", 1.0)
    if temperature < 0:
        raise InvalidArgumentError(
            "sampling.temperature", f"must be 0 or above, got {temperature:g}"
        )
    top_p = _number(params, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise InvalidArgumentError(
            "sampling.top_p", f"must be above 0 and at most 1, got {top_p:g}"
        )
    top_k = _or_default(params, "top_k", 0)
    if top_k < -1:
        raise InvalidArgumentError(
            "sampling.top_k", f"must be -1 or 0 (all tokens) or above, got {top_k}"
        )
    min_p = _number(params, "min_p", 0.0)
    if not 0 <= min_p <= 1:
        raise InvalidArgumentError("sampling.min_p", f"must be from 0 to 1, got {min_p:g}")
    repetition_penalty = _number(params, "repetition_penalty", 1.0)
    if repetition_penalty <= 0:
        raise InvalidArgumentError(
            "sampling.repetition_penalty", f"must be above 0, got {repetition_penalty:g}"
        )
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=_penalty(params, "frequency_penalty"),
        presence_penalty=_penalty(params, "presence_penalty"),
        # 63 bits: many a JSON reader has no unsigned 64-bit integers.
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
    )


def _penalty(params: pb.SamplingParams, name: str) -> float:
    value = _number(params, name, 0.0)
    if abs(value) > MAX_PENALTY:
        raise InvalidArgumentError(
            f"sampling.{name}", f"must be from -{MAX_PENALTY:g} to {MAX_PENALTY:g}, got {value:g}"
        )
    return value


def _number(params: pb.SamplingParams, name: str, default: float) -> float:
    value: float = _or_default(params, name, default)
    if not math.isfinite(value):
        raise InvalidArgumentError(f"sampling.{name}", f"must be a finite number, got {value}")
    return value


def _or_default(message: Any, name: str, default: Any) -> Any:
    """An explicit zero is a value; only an unset field takes its default."""
    return getattr(message, name) if message.HasField(name) else default


def _stop_rules(stopping: pb.StopConditions) -> StopRules:
    field, num_strings = "stopping.stop_strings", len(stopping.stop_strings)
    if num_strings > MAX_STOP_STRINGS:
        raise InvalidArgumentError(field, f"at most {MAX_STOP_STRINGS}, got {num_strings}")
    strings = tuple(stopping.stop_strings)
    for index, string in enumerate(strings):
        size = len(string.encode())
        if not 0 < size <= MAX_STOP_STRING_BYTES:
            raise InvalidArgumentError(
                f"{field}[{index}]", f"must have 1 to {MAX_STOP_STRING_BYTES} bytes, got {size}"
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(
            "stopping.stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS}, got {len(stopping.stop_token_ids)}",
        )
    return StopRules(
        stop_strings=strings,
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_stop_string=stopping.include_stop_string,
    )


def _refuse_unbuilt(request: pb.GenerateRequest) -> None:
    """Values that are right by the contract and that this build does not serve."""
    sampling, output = request.sampling, request.output
    for name in ("logprobs", "prompt_logprobs"):
        if output.HasField(name) and getattr(output, name) > MAX_LOGPROBS:
            raise InvalidArgumentError(
                f"output.{name}", f"at most {MAX_LOGPROBS}, got {getattr(output, name)}"
            )
    num_completions = _or_default(request, "n", 1)
    if not 1 <= num_completions <= MAX_COMPLETIONS:
        raise InvalidArgumentError(
            "n", f"must be from 1 to {MAX_COMPLETIONS}, got {num_completions}"
        )
    asked_for = {
        "n": num_completions != 1,
        "truncate_prompt_tokens": request.HasField("truncate_prompt_tokens"),
        "priority": request.priority != 0,
        "structured_output": request.structured_output.WhichOneof("constraint") is not None,
        "output.logprobs": output.HasField("logprobs"),
        "output.prompt_logprobs": output.HasField("prompt_logprobs"),
        "stopping.min_tokens": request.stopping.min_tokens > 0,
        "sampling.min_p": _or_default(sampling, "min_p", 0.0) != 0,
        "sampling.repetition_penalty": _or_default(sampling, "repetition_penalty", 1.0) != 1,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.logit_bias": len(sampling.logit_bias) > 0,
        "sampling.allowed_token_ids": len(sampling.allowed_token_ids) > 0,
    }
    for field, is_asked_for in asked_for.items():
        if is_asked_for:
            raise UnimplementedError(field)
