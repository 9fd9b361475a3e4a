"""Prompts to token ids off the event loop, refused early where they cannot fit."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from gateway.backoff import RETRY_AFTER_MS
from gateway.chat_template import TemplateRefusedError
from gateway.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.served_model import ServedModel
from gateway.tokenizer import NoTextError, Tokenizer
from shared.errors import InvalidArgumentError, QueueFullError

_T = TypeVar("_T")


class PromptEncoder:
    """Encodes on a few threads; a request that is cancelled while it waits is never encoded.

    Every call raises QueueFullError, at once, when `max_pending` others are not done.
    """

    def __init__(self, executor: Executor, *, max_prompt_bytes: int, max_pending: int) -> None:
        self._executor = executor
        self._max_prompt_bytes = max_prompt_bytes
        self._max_pending = max_pending
        self._num_pending = 0

    def encode(
        self, prompt: Prompt, model: ServedModel, *, keep_last: int | None = None
    ) -> asyncio.Future[list[int]]:
        """The prompt's token ids, with room for at least one more in the context.

        Of a longer prompt, only its last `keep_last` are kept; None: all. The future raises
        InvalidArgumentError, naming the prompt's field.
        """
        return self._run(lambda: self._encode_to_run(prompt, model, keep_last))

    def tokenize(self, prompt: Prompt, model: ServedModel) -> asyncio.Future[list[int]]:
        """The same ids, however many."""
        return self._run(lambda: self._encode(prompt, model.tokenizer))

    def decode(
        self, token_ids: Sequence[int], model: ServedModel, *, skip_special_tokens: bool
    ) -> asyncio.Future[str]:
        def decode() -> str:
            return model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return self._run(decode)

    def convert(self, convert: Callable[[], _T]) -> asyncio.Future[_T]:
        """Whatever else takes long for the texts of many tokens."""
        return self._run(convert)

    def _run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        if self._num_pending >= self._max_pending:
            raise QueueFullError(
                f"{self._num_pending} texts wait for the tokenizer, "
                f"the limit is {self._max_pending}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._num_pending += 1
        future.add_done_callback(self._forget)
        return future

    def _forget(self, _: asyncio.Future[_T]) -> None:
        self._num_pending -= 1

    def _encode_to_run(
        self, prompt: Prompt, model: ServedModel, keep_last: int | None
    ) -> list[int]:
        context = model.info.max_context_tokens
        # However long a text is, its end may fit.
        longest = context if keep_last is None else None
        token_ids = self._encode(prompt, model.tokenizer, longest)
        if not token_ids:
            raise InvalidArgumentError(prompt.field, "the prompt has no tokens")
        if keep_last is not None:
            token_ids = token_ids[-keep_last:]
        _require_room(prompt.field, len(token_ids), context)
        if isinstance(prompt, TokenPrompt):
            _require_in_vocabulary(prompt.field, token_ids, model.info.vocab_size)
        return token_ids

    def _encode(
        self, prompt: Prompt, tokenizer: Tokenizer, context: int | None = None
    ) -> list[int]:
        match prompt:
            case TokenPrompt():
                return prompt.token_ids
            case TextPrompt():
                text, add_special_tokens = prompt.text, prompt.add_special_tokens
            case ChatPrompt():
                # The template prints the special tokens itself; a second BOS would be wrong.
                text, add_special_tokens = _render(prompt, tokenizer), False
        if context is not None:
            min_tokens = tokenizer.min_tokens(text)
            if min_tokens >= context:
                raise _too_long(prompt.field, f"at least {min_tokens}", context)
        # A character has a byte at least, so most texts need not be measured.
        if 4 * len(text) > self._max_prompt_bytes and (size := len(text.encode())) > (
            self._max_prompt_bytes
        ):
            raise InvalidArgumentError(
                prompt.field, f"at most {self._max_prompt_bytes} bytes are encoded, got {size}"
            )
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except NoTextError as error:
            raise InvalidArgumentError(prompt.field, str(error)) from None


def _render(prompt: ChatPrompt, tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        raise InvalidArgumentError(prompt.field, "the served model has no chat template")
    try:
        return tokenizer.chat_template.render(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables=prompt.variables,
        )
    except TemplateRefusedError as error:
        raise InvalidArgumentError(prompt.field, f"the chat template says: {error}") from error


def _require_room(field: str, num_tokens: int, context: int) -> None:
    if num_tokens >= context:
        raise _too_long(field, str(num_tokens), context)


def _too_long(field: str, num_tokens: str, context: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        field,
        f"the prompt has {num_tokens} tokens; the context of {context} leaves room "
        f"for at most {context - 1}",
    )


def _require_in_vocabulary(field: str, token_ids: list[int], vocab_size: int) -> None:
    highest = max(token_ids)
    if highest >= vocab_size:
        raise InvalidArgumentError(
            field, f"must be below the vocabulary size {vocab_size}, got {highest}"
        )
