"""Settings that cannot be used, told in lines that hold no secret."""

from collections.abc import Iterator

from pydantic import ValidationError
from pydantic_settings import BaseSettings


def complaints(program: str, settings: type[BaseSettings], error: ValidationError) -> Iterator[str]:
    """A line for each wrong setting, with the value given unless it is a secret."""
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        flag = f"--{name.replace('_', '-')}: " if name else ""
        # Without a name the value is all settings at once, secrets among them.
        is_open = bool(name) and not _is_secret(settings, name)
        given = f" (got {problem['input']!r})" if is_open else ""
        yield f"{program}: {flag}{problem['msg']}{given}"


def _is_secret(settings: type[BaseSettings], name: str) -> bool:
    field = settings.model_fields.get(name)
    return field is None or "Secret" in repr(field.annotation)
