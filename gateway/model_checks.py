"""Requests checked against the model that is to serve them. Every refusal names the field."""

from collections.abc import Sequence

from gateway.request import GenerationRequest
from gateway.served_model import ModelInfo
from shared.errors import InvalidArgumentError, NotFoundError

# Of tokens and the likeliest beside them: some 10 MB of one message, of which a unary answer
# may have twice as much, for the prompt and for the completions.
MAX_LOGPROB_ENTRIES = 1 << 18


def check_model(name: str, served: ModelInfo) -> None:
    """Raises NotFoundError unless the name is empty or the served model's."""
    if name and name != served.name:
        raise NotFoundError(
            f"model: {name!r} is not served here; {served.name!r} is", field="model"
        )


def check_tokens(request: GenerationRequest, model: ModelInfo) -> None:
    """Every token id is one of the model's, and some token is left that may be sampled."""
    for index, token_id in enumerate(request.stop.stop_token_ids):
        if token_id >= model.vocab_size:
            raise _outside(f"stopping.stop_token_ids[{index}]", token_id, model)
    sampling = request.sampling
    for token_id, _ in sampling.logit_bias:
        if token_id >= model.vocab_size:
            raise _outside(f"sampling.logit_bias[{token_id}]", token_id, model)
    allowed = sampling.allowed_token_ids
    if allowed and (highest := max(allowed)) >= model.vocab_size:
        raise _outside("sampling.allowed_token_ids", highest, model)
    if request.stop.min_tokens:
        _check_something_goes_on(request, model, allowed)


def max_tokens(request: GenerationRequest, num_prompt_tokens: int, model: ModelInfo) -> int:
    """As asked for or the model's default, clipped to what fits in the context."""
    wanted = model.default_max_tokens if request.max_tokens is None else request.max_tokens
    resolved = min(wanted, model.max_context_tokens - num_prompt_tokens)
    if request.stop.min_tokens > resolved:
        raise InvalidArgumentError(
            "stopping.min_tokens",
            f"at most {resolved}, which is max_tokens here, got {request.stop.min_tokens}",
        )
    return resolved


def check_logprobs(request: GenerationRequest, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raises where those of the prompt, or all of a unary answer, would not fit in a message.

    Both numbers of tokens are the resolved ones. A stream may tell any number, by and by.
    """
    output = request.output
    if output.prompt_logprobs is not None:
        _check_num_entries(
            "output.prompt_logprobs", "prompt tokens", num_prompt_tokens, output.prompt_logprobs
        )
    if output.logprobs is not None and request.is_unary:
        num_tokens = request.num_completions * max_tokens
        what = "in a unary call, n times max_tokens"
        _check_num_entries("output.logprobs", what, num_tokens, output.logprobs)


def _check_something_goes_on(
    request: GenerationRequest, model: ModelInfo, allowed: Sequence[int]
) -> None:
    """Before min_tokens, no token that ends the completion may be sampled."""
    ending = set(request.stop.stop_token_ids)
    if not request.stop.ignore_eos:
        ending.update(model.eos_token_ids)
    if ending.issuperset(allowed) if allowed else len(ending) >= model.vocab_size:
        raise InvalidArgumentError(
            "stopping.min_tokens",
            "every token that may be sampled ends the completion, so none can come before that",
        )


def _check_num_entries(field: str, what: str, num_tokens: int, num_top: int) -> None:
    count = num_tokens * (num_top + 1)
    if count > MAX_LOGPROB_ENTRIES:
        raise InvalidArgumentError(
            field, f"{what} times {num_top + 1} must be at most {MAX_LOGPROB_ENTRIES}, got {count}"
        )


def _outside(field: str, token_id: int, model: ModelInfo) -> InvalidArgumentError:
    return InvalidArgumentError(
        field, f"must be below the vocabulary size {model.vocab_size}, got {token_id}"
    )
