"""How a step plan reaches the device: one pinned buffer, one copy, on the scheduler's stream.

A slot is a pinned host buffer and its device twin. The scheduler's stream copies one into
the other while an earlier step still computes; the engine's stream waits for that copy. A
slot is written again only after its copy has run (host side) and after the step that read
its device twin has (device side), which two events tell. So with two slots the host never
waits as long as at most one other step is in flight.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from worker.step import Int32Array, StepPlan

# Per-row fields of a step, one line each in the row block; the last three are float32.
ROWS, CACHED_LENS, WRITE_ROWS, POSITIONS, LAST_TOKENS = range(5)
# Number of the row's late mask, from 1; 0: it has none.
MASK_NUMBER = 5
TOP_K, SEED_LOW, SEED_HIGH, IS_GREEDY = range(6, 10)
TEMPERATURE, TOP_P, MIN_P = range(10, 13)
NUM_FIELDS = 13

_INITIAL_WORDS = 1 << 17


@dataclass(frozen=True, slots=True)
class Staged:
    """Where the parts of one plan lie in a slot's device twin, all int32.

    The row block is [NUM_FIELDS, num_columns]; columns beyond the plan's rows are padding.
    """

    slot: "Slot"
    num_columns: int
    # [3, num_updates]: rows, columns and page ids of page table entries to set.
    updates: torch.Tensor
    # [num_prefill_tokens] each: token ids, and the plan's row that each belongs to.
    prefill_token_ids: torch.Tensor
    prefill_rows: torch.Tensor
    # [num_rows] index of each row's first token in the step.
    first_tokens: torch.Tensor
    # Where what else was to travel with the plan lies.
    extra_words: slice

    @property
    def extra(self) -> torch.Tensor:
        return self.slot.device_words[self.extra_words]

    @property
    def row_block(self) -> torch.Tensor:
        return self.slot.device_words[: NUM_FIELDS * self.num_columns]


class Slot:
    """One pinned buffer, its device twin, and the events that say when each may be reused."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copied = torch.cuda.Event()
        self.read = torch.cuda.Event()
        self._allocate(_INITIAL_WORDS)

    def ensure(self, num_words: int) -> None:
        """Grows the slot; what it held is lost."""
        if num_words > len(self.host):
            # The twin may still be read by a step in flight; it is freed on that stream's
            # terms only if that step is over.
            self.read.synchronize()
            self._allocate(1 << (num_words - 1).bit_length())

    def _allocate(self, num_words: int) -> None:
        self.pinned = torch.zeros(num_words, dtype=torch.int32, pin_memory=True)
        self.host: Int32Array = self.pinned.numpy()
        self.device_words = torch.zeros(num_words, dtype=torch.int32, device=self.device)


class Staging:
    """A ring of slots, filled by the thread that launches steps."""

    def __init__(self, max_rows: int, device: torch.device, num_slots: int = 2) -> None:
        self._slots = [Slot(device) for _ in range(num_slots)]
        self._next = 0
        self._padding = padding_block(max_rows, 1).numpy()

    def stage(
        self, plan: StepPlan, num_columns: int, extra: Int32Array, stream: torch.cuda.Stream
    ) -> Staged:
        """Writes the plan to the next slot and queues its copy on `stream`, the current one.

        Rows are padded to `num_columns`. The reader waits for `slot.copied` and records
        `slot.read` when it is through.
        """
        assert torch.cuda.current_stream() == stream, "staging belongs to the scheduler's stream"
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.copied.synchronize()
        num_updates, num_prefill = len(plan.page_ids), len(plan.prefill_token_ids)
        sizes = (
            NUM_FIELDS * num_columns,
            3 * num_updates,
            num_prefill,
            num_prefill,
            plan.num_rows,
            len(extra),
        )
        starts = [0, *accumulate(align_words(size) for size in sizes)]
        places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        slot.ensure(starts[-1])
        self._write(slot.host, places, plan)
        slot.host[places[5]] = extra
        stream.wait_event(slot.read)
        device = slot.device_words
        device[: starts[-1]].copy_(slot.pinned[: starts[-1]], non_blocking=True)
        slot.copied.record(stream)
        return Staged(
            slot=slot,
            num_columns=num_columns,
            updates=device[places[1]].view(3, num_updates),
            prefill_token_ids=device[places[2]],
            prefill_rows=device[places[3]],
            first_tokens=device[places[4]],
            extra_words=places[5],
        )

    def _write(self, host: Int32Array, places: list[slice], plan: StepPlan) -> None:
        block = host[places[0]].reshape(NUM_FIELDS, -1)
        block[:, plan.num_rows :] = self._padding
        write_rows(block, plan)
        updates = host[places[1]].reshape(3, len(plan.page_ids))
        updates[0], updates[1], updates[2] = plan.page_rows, plan.page_columns, plan.page_ids
        if len(plan.prefill_token_ids):
            host[places[2]] = plan.prefill_token_ids
            row_of_token = np.repeat(np.arange(plan.num_rows, dtype=np.int32), plan.extend_lens)
            host[places[3]] = row_of_token[plan.num_decode :]
            host[places[4]] = np.cumsum(plan.extend_lens) - plan.extend_lens


def write_rows(block: Int32Array, plan: StepPlan) -> None:
    """Fills a row block's first columns; those beyond the plan's rows stay as they are."""
    n = plan.num_rows
    sampling = plan.sampling
    lens = plan.cached_lens + plan.extend_lens
    floats: NDArray[np.float32] = block.view(np.float32)
    seeds = sampling.seeds.view(np.int32).reshape(n, 2)
    block[ROWS, :n] = plan.rows
    block[CACHED_LENS, :n] = plan.cached_lens
    block[WRITE_ROWS, :n] = plan.write_rows
    block[POSITIONS, :n] = lens
    block[LAST_TOKENS, :n] = np.cumsum(plan.extend_lens) - 1
    block[MASK_NUMBER, :n] = 0
    if len(plan.masked):
        block[MASK_NUMBER, plan.masked] = np.arange(1, len(plan.masked) + 1)
    block[TOP_K, :n] = sampling.top_k
    # Little-endian, as every host of an NVIDIA GPU is.
    block[SEED_LOW, :n] = seeds[:, 0]
    block[SEED_HIGH, :n] = seeds[:, 1]
    block[IS_GREEDY, :n] = sampling.is_greedy
    floats[TEMPERATURE, :n] = sampling.temperature
    floats[TOP_P, :n] = sampling.top_p
    floats[MIN_P, :n] = sampling.min_p


def align_words(num_words: int) -> int:
    """Rounded up so that what follows is 16-byte aligned.

    Triton compiles a kernel anew for pointers that are not; that must not happen while serving.
    """
    return -(-num_words // 4) * 4


def padding_block(dummy_row: int, num_columns: int) -> torch.Tensor:
    """Row block of rows that do no harm: one token each, on the dummy page, kept by nobody."""
    block = np.zeros((NUM_FIELDS, num_columns), np.int32)
    block[ROWS] = block[WRITE_ROWS] = dummy_row
    block[IS_GREEDY] = 1
    block.view(np.float32)[[TEMPERATURE, TOP_P]] = 1.0
    return torch.from_numpy(block)
