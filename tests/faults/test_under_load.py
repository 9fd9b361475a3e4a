"""Every kind of fault amid load: one ending for each request, the right ones, nothing left."""

import random

import pytest

from tests.faults.field import Field
from tests.faults.kinds import KINDS, Kind
from tests.faults.ledger import Ledger
from tests.faults.rounds import run_round

pytestmark = pytest.mark.asyncio(loop_scope="package")

# The first three wait for limits of seconds, the others have tests of their own elsewhere;
# `make soak` has them all.
IN_SOAK_ONLY = {
    *("hang a worker", "silent network to a worker", "hang the engine"),
    *("full queue", "slow readers", "disconnects"),
}


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name not in IN_SOAK_ONLY], ids=lambda kind: kind.name
)
async def test_a_fault_amid_load_leaves_everything_as_it_was(
    kind: Kind, field: Field, ledger: Ledger, rng: random.Random
) -> None:
    result = await run_round(field, kind, ledger, rng, num_clients=16, lead_s=0.3)
    assert not ledger.violations
    assert result.outcomes["OK"] > 0
    assert result.pages_back == result.pages_total > 0
