"""A round: load, one fault amid it, and everything as it was afterwards."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults.field import Field
from tests.faults.kinds import Kind
from tests.faults.ledger import ALWAYS, Ledger
from tests.faults.load import load


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave."""

    kind: str
    outcomes: Counter[str]
    # From the last request's end until everything was as it was.
    settle_s: float
    # Pages that are free or cached, and of how many, over all workers.
    pages_back: int
    pages_total: int
    # Over all workers, since each of them began.
    preemptions: int
    memory_mib: Mapping[tuple[str, int], float]


async def run_round(
    field: Field,
    kind: Kind,
    ledger: Ledger,
    rng: random.Random,
    *,
    num_clients: int = 24,
    lead_s: float = 0.5,
) -> Round:
    """Raises AssertionError when the services do not come back to where they were."""
    before = Counter(ledger.outcomes)
    ledger.allowed = kind.allowed
    async with load(field.street.address, ledger, rng, num_clients):
        await asyncio.sleep(lead_s)
        await kind.inject(field, ledger, rng)
        await asyncio.sleep(lead_s)
    began = time.monotonic()
    loads = (await field.settle()).workers
    ledger.allowed = ALWAYS
    return Round(
        kind=kind.name,
        outcomes=ledger.outcomes - before,
        settle_s=time.monotonic() - began,
        pages_back=sum(worker.pages_free + worker.pages_cached for worker in loads),
        pages_total=sum(worker.pages_total for worker in loads),
        preemptions=sum(worker.preemptions for worker in loads),
        memory_mib=field.memory_mib(),
    )
