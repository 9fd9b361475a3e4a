"""Which tokens top-k and top-p keep, exactly, whatever the logits are."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from worker.engine.adjustments import apply_masks
from worker.engine.cuda.bounds import Bounds
from worker.engine.cuda.logits import as_words
from worker.engine.cuda.row_params import RowParams
from worker.engine.cuda.row_state import mask_words
from worker.engine.sampling import lowest_admitted
from worker.step import Float32Array, Int32Array

# On a GPU, more than two programs' part of a row.
VOCAB_SIZE = 2 * 8192 + 77
# The interpreter computes with numpy: inf - inf is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# None of which p is a whole number of k equal weights: there rounding decides.
FILTERS = [(5, 1.0), (0, 0.9), (50, 0.51), (1000, 0.9985), (1500, 0.9003), (0, 0.01), (1, 0.5)]


def awkward_logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(8, VOCAB_SIZE, generator=generator)
    rounded, few, one, spread, flat, small, wide, below = noise * 3
    few[100:] = float("-inf")
    one[:] = float("-inf")
    one[5] = 1.0
    spread[3], spread[4:9] = 1e30, -1e30
    flat[:] = -0.0
    flat[::3] = 0.0
    return torch.stack(
        (
            rounded.round(),
            few,
            one,
            spread,
            flat,
            small * 1e-3,
            torch.exp(wide),
            -torch.exp(below * 2),
        )
    )


def filtering(
    temperature: Float32Array, filters: list[tuple[int, float]], device: torch.device
) -> RowParams:
    """Rows that filter by (top_k, top_p)."""
    top_k, top_p = zip(*filters, strict=True)
    nothing = torch.zeros(len(filters), dtype=torch.int32, device=device)
    return RowParams(
        temperature=torch.from_numpy(temperature).to(device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_p=torch.zeros(len(filters), device=device),
        seed_low=nothing,
        seed_high=nothing,
        is_greedy=nothing,
        positions=nothing,
        mask_number=nothing,
    )


def some_masks() -> Int32Array:
    rng = np.random.default_rng(1)
    masks = rng.integers(-(2**31), 2**31, (4, mask_words(VOCAB_SIZE))).astype(np.int32)
    # Nothing of a whole program's part, and a single token.
    masks[1, :510] = 0
    masks[2] = 0
    masks[2, 400] = 1
    return masks


def assert_keeps(
    values: torch.Tensor, found: float, temperature: float, filters: tuple[int, float]
) -> None:
    k, p = filters
    wanted = lowest_admitted(values, temperature, k, float(np.float32(p)))
    possible = values > float("-inf")
    assert torch.equal(possible & (values >= found), possible & (values >= wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bounds_keep_the_tokens_that_the_reference_keeps(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = awkward_logits().to(dtype)
    count = len(logits)
    temperature = np.random.default_rng(0).uniform(0.3, 1.5, count).astype(np.float32)
    words = as_words(logits.to(device))
    bounds = Bounds(count, VOCAB_SIZE, device)
    for shift in range(len(FILTERS)):
        filters = [FILTERS[(row + shift) % len(FILTERS)] for row in range(count)]
        params = filtering(temperature, filters, device)
        for row, found in enumerate(bounds.find(words, params).tolist()):
            assert_keeps(logits[row].float(), found, float(temperature[row]), filters[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bounds_of_masked_rows_are_of_what_their_masks_permit(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = awkward_logits()[[0, 5, 6, 7, 0, 5]].to(dtype)
    temperature = np.full(len(logits), 0.7, np.float32)
    filters = FILTERS[: len(logits)]
    masked, masks = np.array([1, 3, 4, 5]), some_masks()
    numbers = torch.tensor([0, 2, 0, 1, 4, 3], dtype=torch.int32, device=device)
    params = replace(filtering(temperature, filters, device), mask_number=numbers)
    bounds, words = Bounds(len(logits), VOCAB_SIZE, device), as_words(logits.to(device))
    values = logits.float()
    apply_masks(values.numpy(), masked, masks[numbers.cpu().numpy()[masked] - 1])
    for _ in range(2):
        at_once = bounds.find(words, params).tolist()
        late = bounds.find(words, params, torch.from_numpy(masks).to(device)).tolist()
        for row in range(len(logits)):
            found = late[row] if row in masked else at_once[row]
            assert_keeps(values[row], found, float(temperature[row]), filters[row])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has one program a row")
def test_a_row_has_the_same_bound_whoever_shares_the_work(device: torch.device) -> None:
    # Not rounded to bfloat16, so that sums in another order would show.
    rows = awkward_logits()[:1].to(device) + torch.randn(1, VOCAB_SIZE, device=device)
    temperature = np.full(300, 0.7, np.float32)
    masks = torch.from_numpy(some_masks()).to(device)
    for one in FILTERS:
        for mask_number in (0, 1):
            found = []
            for count in (1, 100, 300):
                bounds = Bounds(count, VOCAB_SIZE, device)
                params = filtering(temperature[:count], [one] * count, device)
                params.mask_number.fill_(mask_number)
                given = masks if mask_number else None
                found += bounds.find(rows.repeat(count, 1), params, given).tolist()
            assert len(set(found)) == 1
