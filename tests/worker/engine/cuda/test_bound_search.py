"""Which tokens top-k and top-p keep, exactly, whatever the logits are."""

import numpy as np
import pytest
import torch

from worker.engine.cuda.bound_search import MOST_CANDIDATES, search_bounds
from worker.engine.cuda.logits import as_words
from worker.engine.cuda.row_params import RowParams
from worker.engine.sampling import lowest_admitted

# More than a program's lanes.
VOCAB_SIZE = 2 * MOST_CANDIDATES + 77
# The interpreter computes with numpy: inf - inf is meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FILTERS = [(5, 1.0), (0, 0.9), (50, 0.5), (1000, 0.999), (1500, 0.9), (0, 0.01), (1, 0.5)]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bounds_keep_the_tokens_that_the_reference_keeps(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = awkward_logits().to(dtype)
    count = len(logits)
    temperature = np.random.default_rng(0).uniform(0.3, 1.5, count).astype(np.float32)
    words = as_words(logits.to(device))
    nothing = torch.zeros(count, dtype=torch.int32, device=device)
    bounds = torch.empty(count, device=device)
    candidates = torch.empty(count, MOST_CANDIDATES, device=device)
    for shift in range(len(FILTERS)):
        filters = [FILTERS[(row + shift) % len(FILTERS)] for row in range(count)]
        top_k, top_p = zip(*filters, strict=True)
        params = RowParams(
            temperature=torch.from_numpy(temperature).to(device),
            top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            min_p=torch.zeros(count, device=device),
            seed_low=nothing,
            seed_high=nothing,
            is_greedy=nothing,
            positions=nothing,
        )
        search_bounds(words, params, candidates, bounds, VOCAB_SIZE)
        for row, found in enumerate(bounds.tolist()):
            values = logits[row].float()
            k, p = filters[row]
            wanted = lowest_admitted(values, float(temperature[row]), k, float(np.float32(p)))
            possible = values > float("-inf")
            assert torch.equal(possible & (values >= found), possible & (values >= wanted))
