"""Matrix products of the smallest decode batches, where cuBLAS is bound by latency.

A layer's four products read 31 MB of weights in Qwen3-0.6B: 7 us at the speed of the
memory, 30 us with cuBLAS at batch 1
and 13 us here. These kernels are launched while the kernel before
them still runs and fetch their weights meanwhile, for weights do not depend on it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.engine.cuda.launch import dependent_launch

# Beyond this cuBLAS, which has tensor cores, is faster.
MOST_ROWS = 2
# Nor for the LM head, which cuBLAS reads at the speed of the memory.
MOST_COLUMNS = 65536


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [num_rows, k] times weight [n, k] transposed, plus bias: [num_rows, n].

    Added to `residual` in place, if there is one.

    For at most MOST_ROWS rows.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    out = residual
    if out is None:
        out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    # Enough programs to fill the device, each with enough weights on the way to it.
    columns = 4 if n >= 4096 else 2
    _small_kernel[(triton.cdiv(n, columns),)](
        out,
        x,
        weight,
        bias if bias is not None else x,
        n,
        x.stride(0),
        NUM_ROWS=num_rows,
        K=k,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        COLUMNS=columns,
        BLOCK_K=min(triton.next_power_of_2(k), 1024),
        num_warps=2,
        **dependent_launch(),
    )
    return out


@triton.jit
def _small_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    bias,
    n,
    x_stride,
    NUM_ROWS: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < n
    # Columns beyond the edge read the first one instead of nothing.
    w_ptr = weight + tl.where(mask, column, 0)[:, None].to(tl.int64) * K
    k = tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + k[None, :], mask=(k < K)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for row in tl.static_range(NUM_ROWS):
        value = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        acc = tl.sum(w.to(tl.float32) * value[None, :], 1)
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            inside = start + k < K
            more = tl.load(x + row * x_stride + start + k, mask=inside, other=0.0)
            w_more = tl.load(w_ptr + start + k[None, :], mask=inside[None, :], other=0.0)
            acc += tl.sum(w_more.to(tl.float32) * more.to(tl.float32)[None, :], 1)
        if HAS_BIAS:
            acc += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            acc += tl.load(out + row * n + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * n + column, acc.to(out.dtype.element_ty), mask=mask)
