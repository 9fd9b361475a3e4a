"""Products with norm, activation and residual in them, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.cuda.kernels import row_squares
from worker.engine.cuda.product import RowSquares, product, product_add

EPS = 1e-6
# Few and many rows, k and n that no tile divides, and those of a real model. Of the few rows,
# k of one chunk, of three, and too long to be held.
SIZES = [
    (3, 96, 40),
    (16, 576, 54),
    (10, 2600, 48),
    (5, 3200, 40),
    (20, 576, 54),
    (70, 128, 64),
    (256, 160, 96),
]


def _check(ours: Tensor, exact: Tensor) -> None:
    bound = 1e-2 if ours.dtype == torch.bfloat16 else 1e-5
    assert float((ours.double() - exact).norm() / exact.norm()) < bound


def _random(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    root: float = size[-1] ** 0.5
    return (torch.randn(size, device=device) / root).to(dtype)


def _normed(x: Tensor) -> Tensor:
    normed: Tensor = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    return normed


@pytest.mark.parametrize(("num_rows", "k", "n"), SIZES)
def test_a_product_is_added_and_its_squares_are_kept(
    num_rows: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = _random(num_rows, k, dtype=dtype, device=device)
    weight = _random(n, k, dtype=dtype, device=device)
    bias = _random(n, dtype=dtype, device=device)
    residual = _random(num_rows, n, dtype=dtype, device=device)
    exact = residual.double() + x.double() @ weight.double().T + bias.double()
    sums = product_add(x, weight, bias, residual)
    _check(residual, exact)
    _check(sums.sum(0), (residual.double() ** 2).sum(-1))


@pytest.mark.parametrize(("num_rows", "k", "n"), SIZES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_product_of_normed_rows(
    num_rows: int, k: int, n: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = _random(num_rows, k, dtype=dtype, device=device)
    weight = _random(n, k, dtype=dtype, device=device)
    exact = _normed(x.double()) @ weight.double().T
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    squares = RowSquares(row_squares(x), EPS)
    _check(product(x, weight, None, squares=squares, gated=gated), exact)


@pytest.mark.parametrize("num_rows", [16, 24])
def test_a_product_repeats_itself(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = _random(num_rows, 576, dtype=dtype, device=device)
    weight = _random(96, 576, dtype=dtype, device=device)
    residual = _random(num_rows, 96, dtype=dtype, device=device)
    again = residual.clone()
    assert torch.equal(product_add(x, weight, None, residual), product_add(x, weight, None, again))
    assert torch.equal(residual, again)
