"""The options of a generation, checked as far as that goes without the model.

Every refusal names the field at fault, with its limit and the value given.
"""

import json
import math
import secrets
from typing import Any

from gateway.request import OutputOptions, StopRules
from shared.errors import InvalidArgumentError
from shared.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_STRUCTURE_BYTES,
)
from shared.pb.tandem.v1 import inference_pb2 as pb
from shared.types import SamplingParams, StructuredOutput, StructureKind

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
# More than any vocabulary has. On the event loop, so many take some 0.1 s.
MAX_ALLOWED_TOKEN_IDS = 1 << 19

_TEXT_KINDS = {
    "json_schema": StructureKind.JSON_SCHEMA,
    "regex": StructureKind.REGEX,
    "grammar": StructureKind.GRAMMAR,
}


def sampling_params(params: pb.SamplingParams) -> SamplingParams:
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
    top_k = or_default(params, "top_k", 0)
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
        logit_bias=_logit_bias(params),
        allowed_token_ids=_allowed_token_ids(params),
    )


def stop_rules(stopping: pb.StopConditions) -> StopRules:
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
        min_tokens=stopping.min_tokens,
    )


def output_options(output: pb.OutputOptions) -> OutputOptions:
    return OutputOptions(
        skip_special_tokens=or_default(output, "skip_special_tokens", True),
        logprobs=_num_logprobs(output, "logprobs"),
        prompt_logprobs=_num_logprobs(output, "prompt_logprobs"),
    )


def structured_output(request: pb.GenerateRequest) -> StructuredOutput | None:
    """None: the output is free. Whether a text means anything is for the worker to say."""
    structure = request.structured_output
    name = structure.WhichOneof("constraint")
    if name is None:
        return None
    _refuse_what_leaves_nothing(request)
    field = f"structured_output.{name}"
    match name:
        case "json_object":
            if not structure.json_object:
                raise InvalidArgumentError(field, "must be true; leave it unset for free output")
            return StructuredOutput(StructureKind.JSON_OBJECT)
        case "choice":
            return StructuredOutput(
                StructureKind.CHOICE, choices=_choices(structure.choice, f"{field}.choices")
            )
        case _:
            text = getattr(structure, name)
            _check_structure_size(field, len(text.encode()))
            if name == "json_schema":
                _check_is_schema(text, field)
            return StructuredOutput(_TEXT_KINDS[name], text)


def or_default(message: Any, name: str, default: Any) -> Any:
    """An explicit zero is a value; only an unset field takes its default."""
    return getattr(message, name) if message.HasField(name) else default


def _penalty(params: pb.SamplingParams, name: str) -> float:
    value = _number(params, name, 0.0)
    if abs(value) > MAX_PENALTY:
        raise InvalidArgumentError(
            f"sampling.{name}", f"must be from -{MAX_PENALTY:g} to {MAX_PENALTY:g}, got {value:g}"
        )
    return value


def _number(params: pb.SamplingParams, name: str, default: float) -> float:
    value: float = or_default(params, name, default)
    if not math.isfinite(value):
        raise InvalidArgumentError(f"sampling.{name}", f"must be a finite number, got {value}")
    return value


def _logit_bias(params: pb.SamplingParams) -> tuple[tuple[int, float], ...]:
    if not params.logit_bias:
        return ()
    field, count = "sampling.logit_bias", len(params.logit_bias)
    if count > MAX_LOGIT_BIASES:
        raise InvalidArgumentError(field, f"at most {MAX_LOGIT_BIASES} tokens, got {count}")
    for token_id, bias in params.logit_bias.items():
        # Said so that NaN fails, too.
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise InvalidArgumentError(
                f"{field}[{token_id}]",
                f"must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {bias:g}",
            )
    return tuple(sorted(params.logit_bias.items()))


def _allowed_token_ids(params: pb.SamplingParams) -> tuple[int, ...]:
    count = len(params.allowed_token_ids)
    if count > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidArgumentError(
            "sampling.allowed_token_ids", f"at most {MAX_ALLOWED_TOKEN_IDS} ids, got {count}"
        )
    return tuple(dict.fromkeys(params.allowed_token_ids))


def _num_logprobs(output: pb.OutputOptions, name: str) -> int | None:
    if not output.HasField(name):
        return None
    count: int = getattr(output, name)
    if count > MAX_LOGPROBS:
        raise InvalidArgumentError(f"output.{name}", f"at most {MAX_LOGPROBS}, got {count}")
    return count


def _refuse_what_leaves_nothing(request: pb.GenerateRequest) -> None:
    """A token that a structure asks for may be one that these forbid."""
    others = {
        "stopping.ignore_eos": request.stopping.ignore_eos,
        "stopping.min_tokens": request.stopping.min_tokens > 0,
        "sampling.allowed_token_ids": len(request.sampling.allowed_token_ids) > 0,
    }
    for other, is_set in others.items():
        if is_set:
            raise InvalidArgumentError(
                "structured_output", f"cannot go with {other}: nothing might be left to sample"
            )


def _check_structure_size(field: str, size: int) -> None:
    if not 0 < size <= MAX_STRUCTURE_BYTES:
        raise InvalidArgumentError(field, f"must have 1 to {MAX_STRUCTURE_BYTES} bytes, got {size}")


def _check_is_schema(text: str, field: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, f"is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidArgumentError(field, "must be a JSON object, as schemas are")


def _choices(choice: pb.ChoiceList, field: str) -> tuple[str, ...]:
    count = len(choice.choices)
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidArgumentError(field, f"must be 1 to {MAX_CHOICES}, got {count}")
    for index, text in enumerate(choice.choices):
        if not text:
            raise InvalidArgumentError(f"{field}[{index}]", "must not be empty")
    _check_structure_size(field, sum(len(text.encode()) for text in choice.choices))
    return tuple(choice.choices)
