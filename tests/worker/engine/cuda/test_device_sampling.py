"""The device's sampler against the reference, token for token."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from worker.engine.adjustments import apply_masks
from worker.engine.cuda.row_params import RowParams
from worker.engine.cuda.row_state import mask_words
from worker.engine.cuda.sampling import FAULTY, Sampler
from worker.engine.sampling import sample
from worker.step import Int32Array, SamplingBatch

VOCAB_SIZE = 1777
# The interpreter computes with numpy, and both sides of a choice: inf - inf is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _batch(count: int, seed: int) -> tuple[SamplingBatch, Int32Array]:
    """Rows that filter in every way, and in none."""
    rng = np.random.default_rng(seed)
    batch = SamplingBatch(
        temperature=rng.uniform(0.3, 1.5, count).astype(np.float32),
        top_k=rng.choice([0, 1, 5, 50, 10_000], count).astype(np.int32),
        top_p=rng.choice([1.0, 0.9, 0.5, 0.01], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.05], count).astype(np.float32),
        seeds=rng.integers(0, 2**64, count, dtype=np.uint64),
        is_greedy=rng.random(count) < 0.2,
    )
    return batch, rng.integers(0, 10_000, count).astype(np.int32)


# What stands where nothing was drawn.
_UNTOUCHED = 12345


def _draw(
    logits: torch.Tensor,
    positions: Int32Array,
    batch: SamplingBatch,
    device: torch.device,
    mask_numbers: Int32Array | None = None,
    masks: Int32Array | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled ids, and the token pool, of which entry i + 1 is row i's."""
    count = len(logits)
    seeds = batch.seeds.view(np.int32).reshape(count, 2)

    def on_device(array: NDArray[np.float32] | Int32Array) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(device)

    params = RowParams(
        temperature=on_device(batch.temperature),
        top_k=on_device(batch.top_k),
        top_p=on_device(batch.top_p),
        min_p=on_device(batch.min_p),
        seed_low=on_device(seeds[:, 0]),
        seed_high=on_device(seeds[:, 1]),
        is_greedy=on_device(batch.is_greedy.astype(np.int32)),
        positions=on_device(positions),
        mask_number=on_device(np.zeros(count, np.int32) if mask_numbers is None else mask_numbers),
    )
    pool = torch.full((count + 1,), _UNTOUCHED, dtype=torch.int32, device=device)
    ids = torch.full((count,), _UNTOUCHED, dtype=torch.int32, device=device)
    write_rows = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    sampler = Sampler(count, logits.shape[1], device)
    for _ in range(2):
        given = None if masks is None else on_device(masks)
        sampler.sample(logits.to(device), params, write_rows, pool, ids, given)
    return ids.cpu(), pool.cpu()


def test_draws_are_those_of_the_reference(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(40, VOCAB_SIZE) * 2).bfloat16()
    batch, positions = _batch(len(logits), seed=1)
    expected, _ = sample(logits.float(), positions, batch)
    ids, pool = _draw(logits, positions, batch, device)
    # A device's logarithm differs in its last bits, which may decide between two that tie.
    assert (ids == expected).float().mean() >= (1.0 if device.type == "cpu" else 0.97)
    assert torch.equal(pool[1:], ids)


@pytest.mark.parametrize("masked", [[0, 2, 5, 6], list(range(8)), []])
def test_masked_rows_draw_what_is_permitted_and_others_at_another_time(
    masked: list[int], device: torch.device
) -> None:
    # More than one program's part.
    vocab_size = 2 * 8192 + 77
    torch.manual_seed(0)
    logits = (torch.randn(8, vocab_size) * 2).bfloat16()
    batch, positions = _batch(len(logits), seed=5)
    rng = np.random.default_rng(5)
    masks = rng.integers(-(2**31), 2**31, (8, mask_words(vocab_size))).astype(np.int32)
    # Nothing of the first program's part.
    masks[0, :512] = 0
    numbers = np.zeros(8, np.int32)
    numbers[masked] = 1 + np.arange(len(masked))[::-1]
    adjusted = logits.float()
    apply_masks(adjusted.numpy(), np.array(masked, np.int32), masks[numbers[masked] - 1])
    expected, _ = sample(adjusted, positions, batch)
    late, late_pool = _draw(logits, positions, batch, device, numbers, masks)
    at_once, pool = _draw(logits, positions, batch, device, numbers)
    others = np.setdiff1d(np.arange(8), masked)
    assert (late[others] == _UNTOUCHED).all()
    assert (late_pool[1:][others] == _UNTOUCHED).all()
    assert (at_once[masked] == _UNTOUCHED).all()
    assert (pool[1:][masked] == _UNTOUCHED).all()
    drawn = torch.where(torch.from_numpy(numbers) != 0, late, at_once)
    assert (drawn == expected).sum() >= (8 if device.type == "cpu" else 7)
    assert torch.equal(torch.where(torch.from_numpy(numbers) != 0, late_pool[1:], pool[1:]), drawn)


def test_a_draw_does_not_depend_on_its_batch_mates(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(16, VOCAB_SIZE) * 2).bfloat16()
    batch, positions = _batch(16, seed=2)
    together, _ = _draw(logits, positions, batch, device)
    for i in (0, 7, 15):
        arrays = {name: getattr(batch, name)[i : i + 1] for name in SamplingBatch.__slots__}
        alone, _ = _draw(logits[i : i + 1], positions[i : i + 1], SamplingBatch(**arrays), device)
        assert alone[0] == together[i]


def test_logits_that_are_not_finite_are_told_and_leave_a_valid_token(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB_SIZE).bfloat16()
    logits[0, 3], logits[1, 1000] = float("nan"), float("inf")
    logits[2] = float("-inf")
    batch, positions = _batch(4, seed=3)
    ids, pool = _draw(logits, positions, batch, device)
    assert (ids[:3] == FAULTY).all()
    assert ids[3] >= 0
    assert (pool >= 0).all()
