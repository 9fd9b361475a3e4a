"""Memory is flat through what clients can do."""

import random

import pytest

from tests.faults.field import Field
from tests.faults.kinds import disconnects
from tests.faults.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")

# `make soak` has 10,000 of them.
NUM_DISCONNECTS = 500
MOST_GROWTH_MIB = 12


async def test_disconnects_leave_no_memory_behind(
    field: Field, ledger: Ledger, rng: random.Random
) -> None:
    await disconnects(field, ledger, rng, total=NUM_DISCONNECTS // 2)
    await field.settle()
    before = field.memory_mib()
    await disconnects(field, ledger, rng, total=NUM_DISCONNECTS)
    await field.settle()
    grown = {name: mib - before[name] for name, mib in field.memory_mib().items()}
    assert not ledger.violations
    assert all(mib < MOST_GROWTH_MIB for mib in grown.values()), grown
