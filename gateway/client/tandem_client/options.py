"""What a caller can ask for: prompts, and the options of a completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    # system, user, assistant, tool, or whatever else the model's template knows.
    role: str
    content: str
    # Further fields, such as tool_calls, that can be written as JSON.
    extra: Mapping[str, Any] = field(default_factory=dict)


# Text as it stands; token ids; or a chat, whose messages may be mappings with the keys role
# and content and any further fields.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message | Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """How a chat becomes a prompt; for prompts that are chats."""

    # Not given: true, unless continue_final_message.
    add_generation_prompt: bool | None
    # The last message is left open, and the completion goes on in it.
    continue_final_message: bool
    # Further variables of the template.
    template_kwargs: Mapping[str, Any] | None
    # Tool definitions, for the template.
    tools: Sequence[Mapping[str, Any]] | None


class GenerateOptions(ChatOptions, total=False):
    """Keyword options of a completion; what is not given, or None, is the server's choice.

    The limits and the exact meaning of each are those of its namesake in
    `protos/tandem/v1/inference.proto`.
    """

    # Not given: one of the client's own. Must not be live already.
    request_id: str | None
    # Not given: whatever is served.
    model: str | None
    max_tokens: int | None
    # Ends OK, with reason TIME_LIMIT, after this long.
    time_limit_ms: int | None
    # A higher one leaves the queue earlier; 0 is normal.
    priority: int | None
    # Requests with different salts never share cached prefixes.
    cache_salt: str | None
    # Keep only the last this many tokens of the prompt.
    truncate_prompt_tokens: int | None

    # 0 is greedy.
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    # The same seed and request give the same completion. Not given: drawn; Finished tells it.
    seed: int | None
    # Added to the logits, by token id.
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None

    # One, or several.
    stop_strings: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    # Keep the stop string that matched in the text.
    include_stop_string: bool | None
    # No stop of any kind before this many.
    min_tokens: int | None

    # Not given: true.
    skip_special_tokens: bool | None
    # Log-probabilities of the sampled tokens, and of this many likeliest; 0: no others.
    logprobs: int | None
    # The same for the prompt.
    prompt_logprobs: int | None

    # At most one of these. A schema is JSON text, or what could be written as such.
    json_schema: str | Mapping[str, Any] | None
    # Any JSON object.
    json_object: bool | None
    regex: str | None
    # EBNF with the start rule `root`.
    grammar: str | None
    choice: Sequence[str] | None
