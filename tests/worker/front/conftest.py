"""A worker in this process over a real engine process, and a gateway's end of a stream."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.worker.front.harness import FrontWorker, running_worker

MakeWorker = Callable[..., AbstractAsyncContextManager[FrontWorker]]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 1000 words and nothing else: an echo engine over it starts at once."""
    folder = tmp_path_factory.mktemp("words")
    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 1000)}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_worker(tokenizer_folder: Path) -> MakeWorker:
    """Starts a worker with an echo engine; settings by keyword."""
    return partial(running_worker, tokenizer_folder)


@pytest.fixture
async def worker(make_worker: MakeWorker) -> AsyncIterator[FrontWorker]:
    """One with 1 ms steps, room for 4 running and 4 waiting, and contexts of 128."""
    async with make_worker() as worker:
        yield worker
        await worker.assert_clean()
