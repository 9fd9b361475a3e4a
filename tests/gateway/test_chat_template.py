"""Chats are rendered and encoded as transformers does it, and refusals say why."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import ChatTemplate, TemplateRefusedError
from gateway.tokenizer import TemplateLimits, TextTokenizer

SYSTEM_USER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hé <b>&'\" 世界 😀  "},
]
TALK = [
    *SYSTEM_USER,
    {"role": "assistant", "content": "Fine. "},
    {"role": "user", "content": "And <|im_end|> you?"},
]
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather in <Zürich> & elsewhere",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
WITH_TOOLS = """
{%- if tools %}
    {{- bos_token }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool.function | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skipped' %}{% continue %}{% endif %}
    {%- if message.tool_calls is defined %}
        {{- message.tool_calls | tojson(sort_keys=True) }}
    {%- endif %}
    {{- '<' + message.role + '>' + (message.content or '') | trim }}
{%- endfor %}
{%- if add_generation_prompt %}
<assistant>
{%- endif %}
"""
NAMESPACE = """
{% set ns = namespace(count=0, last='') %}
{% for message in messages %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}{{ message['content'][:3] }}{% endgeneration %}
    {% if ns.count == 3 %}{% break %}{% endif %}
{% endfor %}
{{ ns.count }} {{ dict(a=1) }} {{ messages | length }} {{ eos_token }}{{ extra | default('-') }}
"""
REASONING = (
    "{% for m in messages %}{{ m.reasoning_content | default('none') }}|"
    "{{ m.thinking | default('none') }}|{{ m.content is defined }};{% endfor %}"
)

CASES: dict[str, dict[str, Any]] = {
    "plain": {"template": PLAIN, "messages": TALK},
    "tools": {
        "template": WITH_TOOLS,
        "messages": [
            *TALK,
            {"role": "skipped", "content": "x"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"name": "weather", "arguments": {"city": "Bern", "a": 1.5}}],
            },
            {"role": "tool", "content": "sunny"},
        ],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    "namespace, loop controls, generation": {"template": NAMESPACE, "messages": TALK},
    "variables": {
        "template": NAMESPACE,
        "messages": TALK,
        "variables": {"extra": {"deep": [1, None, True]}, "eos_token": "<end>"},
    },
    "reasoning names": {
        "template": REASONING,
        "messages": [
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "assistant", "thinking": "t", "content": None},
            {"role": "assistant", "content": "c", "reasoning_content": "rc", "thinking": "t"},
        ],
    },
    "documents are null": {
        "template": "{{ documents is none }}{{ tools is none }}",
        "messages": TALK,
    },
    "continued": {
        "template": PLAIN,
        "messages": [*TALK, {"role": "assistant", "content": "I am "}],
        "continue_final_message": True,
    },
    "continued and trimmed": {
        "template": "{% for m in messages %}{{ m['content'] | trim }}</s>{% endfor %}",
        "messages": [*TALK, {"role": "assistant", "content": " I am "}],
        "continue_final_message": True,
    },
    "named, without tools": {
        "template": {"default": "D{{ messages | length }}", "tool_use": "T{{ tools | length }}"},
        "messages": TALK,
    },
    "named, with tools": {
        "template": {"default": "D{{ messages | length }}", "tool_use": "T{{ tools | length }}"},
        "messages": TALK,
        "tools": TOOLS,
    },
    "date": {"template": "{{ strftime_now('%Y') }}", "messages": TALK},
    "whitespace control": {
        "template": "  {% if true %}\n  a\n  {% endif %}\n\n {{- 'b' }}\n",
        "messages": TALK,
    },
}


@pytest.fixture(scope="module")
def cases(smollm2_files: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    own = smollm2_files["chat_template.jinja"].decode()
    models: dict[str, dict[str, Any]] = {
        "the model's own": {"template": own, "messages": TALK},
        "the model's own, to go on": {
            "template": own,
            "messages": [{"role": "user", "content": "Hi"}],
            "add_generation_prompt": True,
        },
    }
    return CASES | models


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path, cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What transformers makes of every case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gateway.reference_chat", str(smollm2_folder)],
        input=json.dumps(list(cases.values())),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=90,
    )
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", [*CASES, "the model's own", "the model's own, to go on"])
def test_a_chat_equals_what_transformers_makes_of_it(
    name: str,
    cases: dict[str, dict[str, Any]],
    expected: dict[str, dict[str, Any]],
    smollm2_files: dict[str, bytes],
) -> None:
    case = cases[name]
    config = json.loads(smollm2_files["tokenizer_config.json"])
    named = case["template"]
    config["chat_template"] = (
        [{"name": key, "template": value} for key, value in named.items()]
        if isinstance(named, dict)
        else named
    )
    files = {
        "tokenizer.json": smollm2_files["tokenizer.json"],
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    tokenizer = TextTokenizer(files, 49152, TemplateLimits())
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render(
        case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case.get("add_generation_prompt", False),
        continue_final_message=case.get("continue_final_message", False),
        variables=case.get("variables", {}),
    )
    assert text == expected[name]["text"]
    assert tokenizer.encode(text, add_special_tokens=False) == expected[name]["ids"]


def template(source: str, *, max_chars: int = 10_000, max_seconds: float = 5.0) -> ChatTemplate:
    return ChatTemplate(source, {}, max_chars=max_chars, max_seconds=max_seconds)


def refusal(chat_template: ChatTemplate, **arguments: Any) -> str:
    with pytest.raises(TemplateRefusedError) as caught:
        chat_template.render(TALK, **arguments)
    return str(caught.value)


def test_a_template_that_refuses_says_why() -> None:
    source = "{{ raise_exception('System role not supported') }}"
    assert refusal(template(source)) == "System role not supported"


def test_faults_of_a_template_are_refusals() -> None:
    assert "nothing" in refusal(template("{{ nothing.at_all }}"))
    assert "ZeroDivisionError" in refusal(template("{{ 1 // 0 }}"))
    assert "TypeError" in refusal(template("{{ messages + 1 }}"))
    assert "line 1" in refusal(template("{% if %}"))


def test_a_template_cannot_leave_its_sandbox() -> None:
    assert "unsafe" in refusal(template("{{ ''.__class__.__mro__ }}"))
    assert refusal(template("{{ messages.append(1) }}"))


def test_a_template_that_prints_too_much_is_stopped() -> None:
    source = "{% for i in range(9999) %}{% for j in range(9999) %}xxxx{% endfor %}{% endfor %}"
    assert "more than 10000 characters" in refusal(template(source))


def test_a_template_that_takes_too_long_is_stopped() -> None:
    source = (
        "{% for i in range(9999) %}{% for j in range(9999) %}"
        "{% set x = messages[0].role %}{% endfor %}{% endfor %}"
    )
    assert "too long" in refusal(template(source, max_seconds=0.05))


def nested(*loops: str) -> str:
    return "".join("{% " + loop + " %}" for loop in loops) + "{% endfor %}" * len(loops)


FOREVER = {
    "over a client's list": nested("for a in xs", "for b in xs", "for c in xs"),
    "with a condition": nested("for a in xs", "for b in xs if b < 0"),
    "in a macro": (
        "{% macro f(n) %}{% for a in xs %}{{ f(n + 1) if n < 9 }}{% endfor %}{% endmacro %}"
        "{{ f(0) }}"
    ),
    "of itself": "{% for a in xs recursive %}{{ loop(xs) if loop.depth < 9 }}{% endfor %}",
    "in a block": "{% set x %}" + nested("for a in xs", "for b in xs") + "{% endset %}",
}


@pytest.mark.parametrize("case", FOREVER)
def test_no_loop_goes_on_past_the_limit(case: str) -> None:
    begin = time.monotonic()
    variables = {"xs": list(range(20_000))}
    assert "too long" in refusal(template(FOREVER[case], max_seconds=0.1), variables=variables)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    "product", ["10 ** (10 ** 9)", "9 ** (2 ** 30)", "'ab' * 2 ** 40", "2 ** 40 * [1]"]
)
def test_products_that_would_hold_the_process_up_are_refused(product: str) -> None:
    assert "too large" in refusal(template("{{ " + product + " }}"))
    assert (
        template("{{ 2 ** 10 * 3 }}{{ '-' * 4 }}{{ 2 ** 0.5 > 1 }}").render(TALK) == "3072----True"
    )


def test_reserved_variables_are_refused() -> None:
    assert "tools" in refusal(template("x"), variables={"tools": []})


def test_a_message_that_the_template_hides_cannot_be_continued() -> None:
    source = "{{ messages[0].content }}"
    assert "final message" in refusal(template(source), continue_final_message=True)
