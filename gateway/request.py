"""A generation request as the gateway works on it: checked, every default resolved."""

from dataclasses import dataclass, field
from typing import Any

from shared.types import SamplingParams, StructuredOutput


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Encoded as it stands."""

    text: str
    add_special_tokens: bool = True
    field: str = "text"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Run as it is."""

    token_ids: list[int]
    field: str = "token_ids"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Rendered by the model's template, then encoded without a second BOS."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    field: str = "chat"


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a completion before its length does."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    # Before which nothing of this ends it.
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a client is told of a completion."""

    skip_special_tokens: bool = True
    # Likeliest tokens told with each token; None: no log-probabilities at all.
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked for."""

    request_id: str
    # Empty: whatever is served.
    model: str
    prompt: Prompt
    # None: the model's default.
    max_tokens: int | None
    sampling: SamplingParams
    stop: StopRules = field(default_factory=StopRules)
    output: OutputOptions = field(default_factory=OutputOptions)
    structured_output: StructuredOutput | None = None
    num_completions: int = 1
    # Answered by one message, not by a stream of them.
    is_unary: bool = False
    # Keep the prompt's last so many tokens; None: all.
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    # 0: no limit.
    time_limit_ms: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """What a worker is asked for: token ids only."""

    request_id: str
    # Which of the client's completions.
    index: int
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    # As in OutputOptions.
    logprobs: int | None
    prompt_logprobs: int | None
    structured_output: StructuredOutput | None
    priority: int
    cache_salt: str
    time_limit_ms: int
    # 0: no deadline.
    timeout_ms: int
    traceparent: str
    # Whose it is, for fair shares of a worker's queue; empty: nobody's in particular.
    client: str = ""
