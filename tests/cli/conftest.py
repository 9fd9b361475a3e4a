"""A fake gateway for the commands that are its clients."""

from collections.abc import AsyncIterator

import pytest

from tests.cli.fake_gateway import FakeGateway, serve_fake


@pytest.fixture
async def fake_gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway()
    gateway.go_on.set()
    server = await serve_fake(gateway)
    yield gateway
    await server.stop(None)
