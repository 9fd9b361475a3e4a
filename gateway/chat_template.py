"""A model's own chat template, rendered as transformers' `apply_chat_template` renders it.

The template comes with the model and its variables from the client, so it runs in jinja's
immutable sandbox, with a bound on time and on what it may print.
"""

import datetime
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import (
    Call,
    EnvironmentAttribute,
    ExprStmt,
    For,
    Node,
    Scope,
    Template,
)
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks where the message ends that a completion is to go on with. Ends with a space, so
# that a template that trims its messages can be told from one that does not.
_CONTINUE_MARK = "TANDEM-CONTINUES-HERE "
# Names under which reasoning is passed; templates read the first, some the second.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_RESERVED_NAMES = {"messages", "tools", "add_generation_prompt"}

# Of what a template may multiply, in bits or elements; prompts need far less.
_MAX_PRODUCT_SIZE = 1 << 20

# What plain Python raises for a template's mistakes; memory and system errors are not its.
_TEMPLATE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateRefusedError(Exception):
    """The template raised, or cannot be rendered with these variables."""


class ChatTemplate:
    """The compiled template, or the named ones, of one model. Safe to share by threads."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        max_chars: int,
        max_seconds: float,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self._environment = _Environment()
        self._templates: dict[str, jinja2.Template] = {}
        # A broken template refuses chats; text and token ids go on without it.
        self._broken = ""
        try:
            for name, text in sources.items():
                self._templates[name] = self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            self._broken = f"line {error.lineno}: {error.message}"

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` go before the special tokens of the same name.

        Raises TemplateRefusedError with the template's own words.
        """
        name = self._name_for(tools)
        messages = [_as_template_sees(message) for message in messages]
        last_content = _mark(messages) if continue_final_message else ""
        if taken := _RESERVED_NAMES & set(variables or ()):
            raise TemplateRefusedError(f"the variable {sorted(taken)[0]!r} has a field of its own")
        context = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._run(self._templates[name], context)
        except jinja2.TemplateError as error:
            raise TemplateRefusedError(error.message or type(error).__name__) from error
        except _TEMPLATE_FAULTS as error:
            raise TemplateRefusedError(f"{type(error).__name__}: {error}") from error
        return _cut_at_mark(text, last_content) if continue_final_message else text

    def _name_for(self, tools: list[Any] | None) -> str:
        if self._broken:
            raise TemplateRefusedError(self._broken)
        if tools is not None and "tool_use" in self._templates:
            return "tool_use"
        if "default" not in self._templates:
            raise TemplateRefusedError(f"no default among the templates {sorted(self._templates)}")
        return "default"

    def _run(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        parts: list[str] = []
        room = self._max_chars
        with self._environment.time_limit(self._max_seconds):
            for part in template.generate(context):
                self._environment.check_time()
                parts.append(part)
                room -= len(part)
                if room < 0:
                    raise TemplateRefusedError(
                        f"the template printed more than {self._max_chars} characters"
                    )
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """What templates on the Hugging Face hub are written for, with a limit on their time.

    Threads cannot be stopped from outside, so the limit is looked at in every round of every
    loop, and wherever the template calls something or reads an attribute or an item.
    """

    # Python works these out in one go, at worst for hours and without letting go of the GIL.
    # Intercepted, they are not worked out when the template is compiled, either.
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._limits = threading.local()

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Holds for this thread."""
        self._limits.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._limits.deadline

    def check_time(self) -> None:
        """Raises TemplateRefusedError once this thread's limit is over."""
        if time.monotonic() > getattr(self._limits, "deadline", float("inf")):
            raise TemplateRefusedError("the template took too long")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of(operator, left, right) > _MAX_PRODUCT_SIZE:
            raise TemplateRefusedError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _generate(
        self,
        source: Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        for loop in list(source.find_all(For)):
            look = Call(EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, ExprStmt(look).set_lineno(loop.lineno))
        return super()._generate(source, name, filename, defer_init)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(context, obj, *args, **kwargs)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Bits or elements of a product or a power, at most; 0 where it is small in any case."""
    if operator == "**":
        both_whole = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * right if both_whole else 0
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and isinstance(other, int):
            return one.bit_length() + other.bit_length()
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            return len(one) * other
    return 0


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _as_template_sees(message: dict[str, Any]) -> dict[str, Any]:
    """A copy without nulls, and with the reasoning under every name that templates read."""
    seen = {name: value for name, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING_NAMES if name in seen), None)
    if reasoning is not None:
        seen = {"thinking": reasoning, **seen, "reasoning_content": reasoning}
    return seen


def _mark(messages: list[dict[str, Any]]) -> str:
    """Puts the mark behind the last message's content, which it returns as it was."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise TemplateRefusedError("the final message has no text to continue")
    content: str = messages[-1]["content"]
    messages[-1]["content"] = content + _CONTINUE_MARK
    return content


def _cut_at_mark(text: str, last_content: str) -> str:
    place = text.rfind(_CONTINUE_MARK.strip())
    if place < 0 or last_content.strip() not in text:
        raise TemplateRefusedError("the template does not print the final message as it is")
    if text.startswith(_CONTINUE_MARK, place):
        return text[:place]
    # The template trims its messages, so the message's own trailing space goes as well.
    return text[:place].rstrip()
