"""Services for the fault tests, and one random seed for all."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.field import Field, running_field
from tests.faults.ledger import Ledger
from tests.integration.conftest import tokenizer_files

__all__ = ["tokenizer_files"]


@pytest.fixture(scope="session")
def tokenizer(
    tokenizer_files: dict[str, bytes],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def field(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Field]:
    async with running_field(tmp_path_factory.mktemp("field"), tokenizer) as field:
        yield field


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(5)
