"""Norms, activation, prefill's rotation and the small products against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.cuda.decode_attention import DecodeShape, Rotary
from worker.engine.cuda.kernels import rms_norm, rotate_and_append, row_squares, silu_mul
from worker.engine.cuda.linear import small_linear

EPS = 1e-6


def _check(ours: Tensor, exact: Tensor) -> None:
    bound = 1e-2 if ours.dtype == torch.bfloat16 else 1e-5
    assert float((ours.double() - exact).norm() / exact.norm()) < bound


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


def _random(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def test_norm_and_squares(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = _random(5, 576, dtype=dtype, device=device)
    weight = _random(576, dtype=dtype, device=device)
    _check(rms_norm(x, weight, EPS), _normed(x, weight))
    _check(row_squares(x)[0], (x.double() ** 2).sum(-1))


def test_activation(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = _random(3, 2 * 1500, dtype=dtype, device=device)
    gate, up = gate_up.double().chunk(2, -1)
    _check(silu_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize(
    ("num_rows", "k", "n"), [(1, 576, 54), (2, 576, 54), (2, 3072, 40), (1, 96, 4099)]
)
def test_small_products(
    num_rows: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = _random(num_rows, k, dtype=dtype, device=device)
    weight = _random(n, k, dtype=dtype, device=device)
    bias = _random(n, dtype=dtype, device=device)
    exact = x.double() @ weight.double().T
    _check(small_linear(x, weight, None), exact)
    _check(small_linear(x, weight, bias), exact + bias.double())
    residual = _random(num_rows, n, dtype=dtype, device=device)
    added = exact + bias.double() + residual.double()
    _check(small_linear(x, weight, bias, residual), added)
    _check(residual, added)


def test_prefill_tokens_are_normed_rotated_and_stored(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    shape = DecodeShape(num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
    qkv = _random(9, 8, 64, dtype=dtype, device=device)
    keys, values = (_random(4, 2, 16, 64, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(64, device=device)[:9].int()
    positions = torch.arange(3, 12, dtype=torch.int32, device=device)
    angles = torch.randn(20, 32, device=device)
    q_norm, k_norm = (_random(64, dtype=dtype, device=device) for _ in range(2))
    rotary = Rotary(torch.cat((angles.cos(), angles.sin()), -1), q_norm, k_norm, EPS)
    rotated = torch.empty(9, 4, 64, dtype=dtype, device=device)
    rotate_and_append(
        rotated,
        qkv[:, :4],
        qkv[:, 4:],
        keys,
        values,
        shape,
        token_slots=slots,
        positions=positions,
        rotary=rotary,
    )

    def turned(x: Tensor) -> Tensor:
        cos, sin = rotary.cos_sin[positions.long()].double()[:, None].chunk(2, -1)
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    page, offset = slots.long() // 16, slots.long() % 16
    _check(rotated, turned(_normed(qkv[:, :4], q_norm)))
    _check(keys[page, :, offset], turned(_normed(qkv[:, 4:6], k_norm)))
    assert torch.equal(values[page, :, offset], qkv[:, 6:])
