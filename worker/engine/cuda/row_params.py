"""Where a step's row block keeps each row's sampling parameters."""

from dataclasses import dataclass

import torch

from worker.engine.cuda.staging import (
    IS_GREEDY,
    MASK_NUMBER,
    MIN_P,
    POSITIONS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters on the device, [num_rows] each."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    # Halves of the 64-bit seeds, as int32 bit patterns.
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    # int32; non-zero: argmax, whatever the rest says.
    is_greedy: torch.Tensor
    # Where the drawn token will stand in its request.
    positions: torch.Tensor
    # Number of the row's late mask, from 1; 0: it has none.
    mask_number: torch.Tensor

    @classmethod
    def of_block(cls, block: torch.Tensor) -> "RowParams":
        """Views of a row block [NUM_FIELDS, num_columns], int32."""
        floats = block.view(torch.float32)
        return cls(
            temperature=floats[TEMPERATURE],
            top_k=block[TOP_K],
            top_p=floats[TOP_P],
            min_p=floats[MIN_P],
            seed_low=block[SEED_LOW],
            seed_high=block[SEED_HIGH],
            is_greedy=block[IS_GREEDY],
            positions=block[POSITIONS],
            mask_number=block[MASK_NUMBER],
        )

    @property
    def filters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.top_k, self.top_p, self.min_p, self.is_greedy
