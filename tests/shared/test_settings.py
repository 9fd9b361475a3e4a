"""What is said of wrong settings shows what was given, unless it is a secret."""

from typing import Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings

from shared.settings import complaints


class Settings(BaseSettings):
    """Some settings, one of them a secret."""

    max_running: int = Field(default=1, ge=1)
    tokens: tuple[SecretStr, ...] = Field(default=(), max_length=1)
    token: SecretStr | None = Field(default=None, min_length=4)

    @model_validator(mode="after")
    def _not_seven(self) -> Self:
        if self.max_running == 7:
            raise ValueError("--max-running cannot be 7")
        return self


def lines(**values: object) -> list[str]:
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        return list(complaints("tandem test", Settings, error))
    raise AssertionError("nothing is wrong with it")


def test_each_wrong_setting_has_a_line_with_its_flag_and_value() -> None:
    [line] = lines(max_running=0)
    assert line.startswith("tandem test: --max-running: ") and line.endswith("(got 0)")


def test_a_secret_is_not_shown() -> None:
    told = lines(tokens=["s3cret", "s3cret too"], token="s3c")
    assert [line.split()[2] for line in told] == ["--tokens:", "--token:"]
    assert "s3c" not in repr(told)


def test_a_complaint_of_them_all_shows_none_of_them() -> None:
    told = lines(max_running=7, token="s3cret")
    assert told == ["tandem test: Value error, --max-running cannot be 7"]


def test_a_setting_that_is_not_known_is_named_without_its_value() -> None:
    [line] = lines(tokenz="s3cret")
    assert "--tokenz" in line and "s3cret" not in line
