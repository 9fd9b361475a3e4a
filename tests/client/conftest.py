"""Both clients, spoken to in one way; a gateway with fake workers, and a scripted server."""

from collections.abc import AsyncIterator, Callable

import pytest

from tests.client.callers import AsyncCaller, Caller, SyncCaller
from tests.client.scripted_server import ScriptedServer
from tests.gateway.conftest import (
    make_worker,
    quiet,
    served_files,
    smollm2_files,
    smollm2_folder,
    start_gateway,
)
from tests.integration.conftest import echo_pair, start_pair, tokenizer_files

__all__ = [
    "echo_pair",
    "make_worker",
    "quiet",
    "served_files",
    "smollm2_files",
    "smollm2_folder",
    "start_gateway",
    "start_pair",
    "tokenizer_files",
]

MakeCaller = Callable[..., Caller]


@pytest.fixture(params=[SyncCaller, AsyncCaller], ids=["sync", "async"])
def make_caller(request: pytest.FixtureRequest) -> MakeCaller:
    """A client of either kind; enter it, and it is closed at the end."""
    caller: MakeCaller = request.param
    return caller


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server
