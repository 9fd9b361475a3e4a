"""Protobuf <-> what crosses the pipe. The only place that checks a Submit's fields.

Errors name the fields by their paths in the public contract, because that is what the
gateway's client sent.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast

import numpy as np

from shared.errors import InvalidArgumentError, ServingError, UnimplementedError
from shared.limits import (
    MAX_CHOICES,
    MAX_COMPLETIONS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REQUEST_ID_BYTES,
    MAX_STRUCTURE_BYTES,
)
from shared.pb.tandem.worker.v1 import worker_pb2 as pb
from shared.types import SamplingParams, StructuredOutput, StructureKind
from worker.messages import Failed, Finished, Load, NewRequest, Started, TokenLogprobs
from worker.step import BoolArray, EngineInfo, Int32Array

HANDLE_BITS = 32
HANDLE_MASK = (1 << HANDLE_BITS) - 1
# As much of a client's name as tells clients apart.
MAX_CLIENT_CHARS = 128


def uid_of(link_id: int, handle: int) -> int:
    """The worker-wide number of a request; numpy shifts take it apart again."""
    return link_id << HANDLE_BITS | handle


def to_new_request(submit: pb.Submit, uid: int, engine: EngineInfo, now: float) -> NewRequest:
    """Raises InvalidArgumentError or UnimplementedError for a field that cannot be served."""
    _check_request_id(submit.request_id)
    if submit.index >= MAX_COMPLETIONS:
        raise InvalidArgumentError(
            "n", f"at most {MAX_COMPLETIONS} completions are given, got index {submit.index}"
        )
    prompt = _to_prompt(submit, engine)
    max_tokens = _to_max_tokens(submit.max_tokens, len(prompt), engine.max_context)
    return NewRequest(
        uid=uid,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=to_sampling_params(submit.sampling, engine.vocab_size),
        min_tokens=_to_min_tokens(submit.min_tokens, max_tokens),
        stop_token_ids=_to_stop_token_ids(submit.stop_token_ids, engine.vocab_size),
        ignore_eos=submit.ignore_eos,
        priority=submit.priority,
        client=submit.client[:MAX_CLIENT_CHARS],
        cache_salt=submit.cache_salt,
        deadline=now + submit.timeout_ms / 1000 if submit.timeout_ms else None,
        time_limit=now + submit.time_limit_ms / 1000 if submit.time_limit_ms else None,
        arrived_at=now,
        logprobs=_to_num_top(submit, "logprobs"),
        prompt_logprobs=_to_num_top(submit, "prompt_logprobs"),
        structured_output=_to_structured_output(submit, engine),
        index=submit.index,
    )


def to_sampling_params(sampling: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises InvalidArgumentError."""
    _check_range("temperature", sampling.temperature, 0, math.inf)
    _check_range("top_p", sampling.top_p, 0, 1, is_low_open=True)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0, math.inf, is_low_open=True)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    return SamplingParams(
        temperature=sampling.temperature,
        # More than any vocabulary has: all of it, and within the engine's int32.
        top_k=sampling.top_k if sampling.top_k < 1 << 31 else 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        logit_bias=_to_logit_bias(sampling.logit_bias, vocab_size),
        allowed_token_ids=_to_allowed_ids(sampling.allowed_token_ids, vocab_size),
    )


def to_failure(error: ServingError) -> pb.Failure:
    return pb.Failure(
        code=int(error.code),
        message=error.message,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
    )


def fill_step_output(
    output: pb.StepOutput,
    *,
    handles: list[int],
    token_ids: list[int],
    started: Iterable[Started],
    ended: Iterable[Finished | Failed],
    committed_at: float,
) -> None:
    """Fills what is no log-probability; `committed_at` is time.monotonic()'s.

    Lists of ints, because a repeated field takes them at half the cost of an array's
    elements (13 µs against 23 for 256 entries).
    """
    output.handles.extend(handles)
    output.token_ids.extend(token_ids)
    for start in started:
        output.started.add(
            handle=start.uid & HANDLE_MASK,
            cached_tokens=start.cached_tokens,
            queue_position=start.queue_position,
            queue_ms=start.queue_s * 1e3,
        )
    for end in ended:
        if isinstance(end, Failed):
            failure = output.failed.add(handle=end.uid & HANDLE_MASK).failure
            failure.code = int(end.code)
            failure.message = end.message
            failure.field = end.field
            failure.retry_after_ms = end.retry_after_ms
        else:
            _add_finished(output, end)
    output.committed_unix_us = int((time.time() - time.monotonic() + committed_at) * 1e6)


def add_token_logprobs(output: pb.StepOutput, logprobs: TokenLogprobs, chosen: BoolArray) -> None:
    """Adds the chosen entries, in one message for each run of entries of one request."""
    handles = (logprobs.uids[chosen] & HANDLE_MASK).tolist()
    token_ids = logprobs.token_ids[chosen].tolist()
    values, ranks = logprobs.logprobs[chosen].tolist(), logprobs.ranks[chosen].tolist()
    num_top = logprobs.num_top[chosen].tolist()
    # As many of each entry as it asked for, one entry's after another's: to cut every run out
    # of the arrays would take as long as all the rest.
    asked = np.arange(logprobs.top_ids.shape[1]) < logprobs.num_top[chosen, np.newaxis]
    top_ids = logprobs.top_ids[chosen][asked].tolist()
    top_logprobs = logprobs.top_logprobs[chosen][asked].tolist()
    top_end, add = 0, output.logprobs.add
    for start, end in _runs(handles):
        num = num_top[start]
        top_start, top_end = top_end, top_end + num * (end - start)
        add(
            handle=handles[start],
            prompt=logprobs.is_prompt,
            token_ids=token_ids[start:end],
            logprobs=values[start:end],
            ranks=ranks[start:end],
            num_top=num,
            top_token_ids=top_ids[top_start:top_end],
            top_logprobs=top_logprobs[top_start:top_end],
        )


def logprob_entry_bytes(num_top: int) -> int:
    """About what one token takes in a message, with so many of the likeliest."""
    return 12 + 8 * num_top


def to_load_response(load: Load, *, is_ready: bool) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        ready=is_ready,
        running=load.running,
        waiting=load.waiting,
        pages_total=load.pages_total,
        pages_free=load.pages_free,
        pages_cached=load.pages_cached,
        pages_held=load.pages_held,
        steps=load.steps,
        preemptions=load.preemptions,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        generated_tokens=load.generated_tokens,
        idle_s=load.idle_s,
    )


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each stretch of equal values."""
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            yield start, end
            start = end


def _add_finished(output: pb.StepOutput, end: Finished) -> None:
    output.finished.add(
        handle=end.uid & HANDLE_MASK,
        # Both enumerations number the reasons alike; a test holds them to it.
        reason=cast(pb.FinishReason, int(end.reason)),
        matched_token_id=max(end.matched_token_id, 0),
        cached_tokens=end.cached_tokens,
        completion_tokens=end.completion_tokens,
        queue_ms=end.queue_s * 1e3,
        prefill_ms=end.prefill_s * 1e3,
        decode_ms=end.decode_s * 1e3,
    )


def _check_request_id(request_id: str) -> None:
    size = len(request_id.encode())
    if not 1 <= size <= MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(
            "request_id", f"1 to {MAX_REQUEST_ID_BYTES} bytes are allowed, got {size}"
        )


def _to_prompt(submit: pb.Submit, engine: EngineInfo) -> Int32Array:
    num_tokens = len(submit.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidArgumentError("prompt", "no tokens; at least one is needed")
    if num_tokens >= engine.max_context:
        raise InvalidArgumentError(
            "prompt",
            f"{num_tokens} tokens; with at least one to sample, "
            f"the context of {engine.max_context} takes {engine.max_context - 1}",
        )
    prompt = np.fromiter(submit.prompt_token_ids, np.int64, num_tokens)
    largest = int(prompt.max())
    if largest >= engine.vocab_size:
        raise InvalidArgumentError(
            "prompt", f"token id {largest} is outside the vocabulary of {engine.vocab_size}"
        )
    return prompt.astype(np.int32)


def _to_max_tokens(max_tokens: int, prompt_len: int, max_context: int) -> int:
    if max_tokens < 1:
        raise InvalidArgumentError("max_tokens", f"must be at least 1, got {max_tokens}")
    if prompt_len + max_tokens > max_context:
        raise InvalidArgumentError(
            "max_tokens",
            f"{prompt_len} prompt tokens and {max_tokens} more exceed the context of {max_context}",
        )
    return max_tokens


def _to_min_tokens(min_tokens: int, max_tokens: int) -> int:
    if min_tokens > max_tokens:
        raise InvalidArgumentError(
            "stopping.min_tokens",
            f"must be at most max_tokens, which is {max_tokens}, got {min_tokens}",
        )
    return min_tokens


def _to_stop_token_ids(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    return _to_token_ids("stopping.stop_token_ids", ids, vocab_size)


def _to_token_ids(field: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Each id once."""
    token_ids = tuple(dict.fromkeys(ids))
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgumentError(
            field, f"token id {largest} is outside the vocabulary of {vocab_size}"
        )
    return token_ids


def _to_allowed_ids(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    # Every id of the vocabulary allowed is nothing forbidden.
    allowed = _to_token_ids("sampling.allowed_token_ids", ids, vocab_size)
    return allowed if len(allowed) < vocab_size else ()


def _to_logit_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidArgumentError(
            field, f"at most {MAX_LOGIT_BIASES} entries are allowed, got {len(bias)}"
        )
    _to_token_ids(field, bias, vocab_size)
    for token_id, value in bias.items():
        if not (math.isfinite(value) and abs(value) <= MAX_LOGIT_BIAS):
            raise InvalidArgumentError(
                field,
                f"must be a finite number in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], "
                f"got {value:g} for token id {token_id}",
            )
    # In order of the ids: a protobuf map has none of its own.
    return tuple(sorted((token_id, value) for token_id, value in bias.items() if value))


def _to_num_top(submit: pb.Submit, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    if not submit.HasField(name):
        return None
    num_top: int = getattr(submit, name)
    if num_top > MAX_LOGPROBS:
        raise InvalidArgumentError(
            f"output.{name}", f"at most {MAX_LOGPROBS} likeliest tokens are given, got {num_top}"
        )
    return num_top


def _to_structured_output(submit: pb.Submit, engine: EngineInfo) -> StructuredOutput | None:
    if not submit.HasField("structured_output"):
        return None
    if not engine.has_logits:
        raise UnimplementedError("structured_output")
    given = submit.structured_output
    if int(given.kind) not in tuple(StructureKind):
        raise InvalidArgumentError("structured_output", "no kind is set")
    unfit = {
        "stopping.ignore_eos": submit.ignore_eos,
        "stopping.min_tokens": submit.min_tokens > 0,
        "sampling.allowed_token_ids": bool(submit.sampling.allowed_token_ids),
    }
    for field, is_set in unfit.items():
        if is_set:
            raise InvalidArgumentError(
                field, "cannot be combined with structured_output: nothing might be left to sample"
            )
    size = len(given.text.encode()) + sum(len(choice.encode()) for choice in given.choices)
    if size > MAX_STRUCTURE_BYTES:
        raise InvalidArgumentError(
            "structured_output", f"at most {MAX_STRUCTURE_BYTES} bytes are allowed, got {size}"
        )
    if len(given.choices) > MAX_CHOICES:
        raise InvalidArgumentError(
            "structured_output.choice",
            f"at most {MAX_CHOICES} choices are allowed, got {len(given.choices)}",
        )
    return StructuredOutput(StructureKind(given.kind), given.text, tuple(given.choices))


def _check_range(
    name: str, value: float, low: float, high: float, *, is_low_open: bool = False
) -> None:
    is_inside = math.isfinite(value) and low <= value <= high and not (is_low_open and value == low)
    if not is_inside:
        left = "(" if is_low_open else "["
        raise InvalidArgumentError(
            f"sampling.{name}",
            f"must be a finite number in {left}{low:g}, {high:g}], got {value:g}",
        )
