"""The settings tables of README.md: `python -m tests.docs.settings_table` rewrites them.

They are made from the two declarations that also make the flags and the variables.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from gateway.config import GatewayConfig
from worker.config import WorkerConfig

README = Path(__file__).parents[2] / "README.md"
_SERVICES: dict[str, type[BaseSettings]] = {"gateway": GatewayConfig, "worker": WorkerConfig}


def with_fresh_tables(readme: str) -> str:
    """The document with both tables as the code has them now."""
    for service, config in _SERVICES.items():
        begin, end = f"<!-- {service} settings -->", f"<!-- end of {service} settings -->"
        before, found_begin, rest = readme.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"README.md lacks {begin} … {end}")
        readme = "\n".join((before + begin, *_rows(config), end + after))
    return readme


def _rows(config: type[BaseSettings]) -> Iterator[str]:
    yield "| Flag | Default | Meaning |"
    yield "| --- | --- | --- |"
    for name, field in config.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        yield f"| `{flag}` | {_default(field)} | {_meaning(field)} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{value}`" if str(value) else "none"


def _meaning(field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", r"\|")
    choices = list(_choices(field.annotation))
    if choices and not all(choice in meaning for choice in choices):
        meaning += " (" + ", ".join(f"`{choice}`" for choice in choices) + ")"
    return meaning


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for argument in get_args(annotation):
            yield from _choices(argument)


if __name__ == "__main__":
    README.write_text(with_fresh_tables(README.read_text()))
