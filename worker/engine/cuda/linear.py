"""Matrix products of decode steps with what surrounds them: norm before, SwiGLU or residual after.

At small batches a decode step is bound by the number of its kernels, not by their bytes;
folding the norm, the activation and the residual sum into the four products of a layer
leaves five kernels a layer. The products of prefill stay with cuBLAS.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut; found by measurement for each shape and batch size."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def fused_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
) -> None:
    """out = epilogue(norm(x) @ weight.T + bias).

    `weight` is [n, k] row-major; with `swiglu` it holds gate then up and `out` has n / 2
    columns. `residual` is added last and may be `out` itself. The norm's scale is applied
    to the product, which equals norming x but for the rounding of x * gain.
    """
    num_rows, k = x.shape
    columns = out.shape[1]
    grid = (triton.cdiv(columns, tile.block_n), triton.cdiv(num_rows, tile.block_m))
    _linear_kernel[grid](
        out,
        x,
        weight,
        bias if bias is not None else x,
        norm if norm is not None else x,
        residual if residual is not None else x,
        num_rows,
        columns,
        x.stride(0),
        norm_eps,
        K=k,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _linear_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    bias,
    norm,
    residual,
    num_rows,
    columns,
    x_stride,
    norm_eps,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = (m < num_rows)[:, None]
    n_mask = n < columns
    # Rows and columns beyond the edge read the first one instead of nothing: no mask in the loop.
    x_ptr = x + tl.where(m < num_rows, m, 0)[:, None].to(tl.int64) * x_stride + k[None, :]
    w_ptr = weight + tl.where(n_mask, n, 0)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Small tiles keep the squares apart and sum them once; large ones lack the registers.
    SUM_LATE: tl.constexpr = BLOCK_M <= 32
    squares = tl.zeros([BLOCK_M, BLOCK_K] if SUM_LATE else [BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(x_ptr + start)
        if HAS_NORM:
            wide = a.to(tl.float32)
            squares += wide * wide if SUM_LATE else tl.sum(wide * wide, 1)
            a = (wide * tl.load(norm + start + k).to(tl.float32)[None, :]).to(a.dtype)
        w = tl.load(w_ptr + start)
        acc = tl.dot(a, w, acc)
        if SWIGLU:
            w_up = tl.load(w_ptr + start + columns.to(tl.int64) * K)
            acc_up = tl.dot(a, w_up, acc_up)
    if HAS_NORM:
        sums = tl.sum(squares, 1) if SUM_LATE else squares
        scale = tl.rsqrt(sums / K + norm_eps)[:, None]
        acc = acc * scale
        acc_up = acc_up * scale
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if SWIGLU:
        acc = acc * tl.sigmoid(acc) * acc_up
    offset = m[:, None].to(tl.int64) * columns + n[None, :]
    mask = m_mask & n_mask[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=mask)
