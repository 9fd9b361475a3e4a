"""Matrix products of decode steps, with what comes before and after them in one kernel.

A layer has four. The two that read a norm (q/k/v and gate/up) scale their rows by it after
the sum over k: the gain lies in their weights (`CudaOps.fold`), and what is left of a norm is
one factor for each row. The two that add to the residual stream (attention's output and the
MLP's) also leave what that factor is made of: for each tile of columns, the sum of each row's
squares. Sums are added in the order of the tiles, so a product repeats itself bit by bit.

These kernels are launched while the kernel before them still runs, and fetch their weights
into the L2 meanwhile, for weights do not depend on it. Those of the fewest rows do so even
better: `held_product.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.engine.cuda.held_product import choose_columns, held_product, holds
from worker.engine.cuda.launch import FEW_ROWS, dependent_launch, prefetch

# bfloat16 numbers of one line of the L2.
_LINE = 64
# Most lines that a program fetches ahead: 128 KiB.
_MOST_LINES = 1024
_MOST_HIDDEN = 2048
# One row is faster with linear.py (0.85 ms a step, not 0.89), two are not (1.00, not 0.87). Above,
# nothing was measured: no step decodes more rows unless told.
_LEAST_ROWS, _MOST_ROWS = 2, 256


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program works on."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowSquares:
    """Sums of each row's squares over tiles of its columns: [num_tiles, num_rows] float32."""

    sums: torch.Tensor
    eps: float


def suits(hidden_size: int) -> bool:
    """Whether a model is so small that its products are bound by latency in most batches."""
    return hidden_size <= _MOST_HIDDEN


def is_faster(num_rows: int, hidden_size: int) -> bool:
    """Whether these kernels beat cuBLAS's and the kernels that they save."""
    return suits(hidden_size) and _LEAST_ROWS <= num_rows <= _MOST_ROWS


def choose_tile(num_rows: int, n: int, k: int, *, gated: bool) -> Tile:
    """The fastest of six to eight for each product of Qwen3-0.6B, on an H200."""
    narrow = n < 2048
    if num_rows <= 16:
        return Tile(16, 16, 256, 2, 5) if narrow else Tile(16, 32, 128, 4, 8)
    if num_rows <= 32:
        if narrow:
            return Tile(16, 16, 512, 4, 4) if k <= 2048 else Tile(32, 16, 512, 4, 3)
        return Tile(32, 16, 256, 2, 4) if gated else Tile(32, 32, 128, 4, 6)
    if num_rows <= 64:
        return Tile(64, 16, 256, 4, 4) if narrow else Tile(64, 32, 128, 4, 5)
    if num_rows <= 128:
        if narrow:
            return Tile(64, 16, 256, 4, 4) if k <= 2048 else Tile(64, 16, 128, 4, 8)
        return Tile(64, 64, 64, 4, 6) if gated else Tile(64, 64, 128, 4, 4)
    return Tile(64, 32, 128, 4, 6) if narrow else Tile(128, 64, 64, 8, 6)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    squares: RowSquares | None = None,
    gated: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [num_rows, k] times weight [n, k] transposed, plus bias: [num_rows, n].

    With `squares`, of x, its rows are RMS-normed first. `gated` gives [num_rows, n / 2]: silu
    of the first half of the columns times the second.
    """
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    num_rows, k = x.shape
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    if tile is None and holds(num_rows, k):
        sums, eps = (squares.sums, squares.eps) if squares is not None else (None, 0.0)
        held_product(out, x, weight, bias, sums=sums, eps=eps, new_sums=None, gated=gated)
    else:
        _launch(out, x, weight, bias, out, squares, gated=gated, tile=tile)
    return out


def product_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Adds the product to `residual`, in place; gives its rows' squares, as in RowSquares."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if tile is None and holds(num_rows, k):
        sums = _new_sums(residual, choose_columns(n, gated=False))
        held_product(residual, x, weight, bias, sums=None, eps=0.0, new_sums=sums, gated=False)
        return sums
    tile = tile or choose_tile(num_rows, n, k, gated=False)
    sums = _new_sums(residual, tile.columns)
    _launch(residual, x, weight, bias, sums, None, add=True, tile=tile)
    return sums


def _new_sums(residual: torch.Tensor, columns: int) -> torch.Tensor:
    num_rows, n = residual.shape
    size = (triton.cdiv(n, columns), num_rows)
    return torch.empty(size, dtype=torch.float32, device=residual.device)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    new_sums: torch.Tensor,
    squares: RowSquares | None,
    *,
    gated: bool = False,
    add: bool = False,
    tile: Tile | None,
) -> None:
    (num_rows, k), n = x.shape, out.shape[1]
    tile = tile or choose_tile(num_rows, n, k, gated=gated)
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    lines = min(triton.cdiv(k, _LINE), _MOST_LINES // tile.columns)
    _product_kernel[(triton.cdiv(n, tile.columns), triton.cdiv(num_rows, tile.rows))](
        out,
        x,
        weight,
        bias if bias is not None else x,
        squares.sums if squares is not None else x,
        new_sums,
        num_rows,
        x.stride(0),
        squares.eps if squares is not None else 0.0,
        N=n,
        K=k,
        NUM_SUMS=squares.sums.shape[0] if squares is not None else 0,
        BLOCK_SUMS=triton.next_power_of_2(squares.sums.shape[0]) if squares is not None else 1,
        HAS_BIAS=bias is not None,
        GATED=gated,
        ADD=add,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=min(tile.k, triton.next_power_of_2(k)),
        LINES=triton.next_power_of_2(lines),
        EARLY=num_rows > FEW_ROWS,
        PREFETCH=num_rows <= FEW_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch(),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(  # type: ignore[no-untyped-def]  # noqa: C901 - Triton has no closures
    out,
    x,
    weight,
    bias,
    sums,
    new_sums,
    num_rows,
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the edge are not read: were they to read the last row instead, all programs
    # would wait for the same few lines of the L2. Columns do, of which hardly any are beyond.
    has_row = (m < num_rows)[:, None]
    if GATED:
        # Gate and up take turns: one product of twice the width, whose neighbours in a row end
        # up in one thread. Two products in the loop would wait for each other.
        both = tl.arange(0, 2 * BLOCK_N)
        column = tl.program_id(0) * BLOCK_N + both // 2
        w_row = tl.minimum(column, N - 1) + both % 2 * N
    else:
        w_row = tl.minimum(n, N - 1)
    w_rows = weight + w_row.to(tl.int64)[:, None] * K
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        if PREFETCH and tl.program_id(1) == 0:
            line = tl.minimum(tl.arange(0, LINES) * 64, K - 1)[None, :]
            prefetch(w_rows + line)
        gdc_wait()
    exists = has_row & (n < N)[None, :]
    out_ptr = out + m[:, None].to(tl.int64) * N + n[None, :]
    if NUM_SUMS > 0:
        t = tl.arange(0, BLOCK_SUMS)
        parts = tl.load(
            sums + t[None, :] * num_rows + m[:, None],
            mask=has_row & (t < NUM_SUMS)[None, :],
            other=0.0,
        )
        scale = tl.rsqrt(tl.sum(parts, 1) / K + eps)
    if ADD:
        before = tl.load(out_ptr, mask=exists, other=0.0).to(tl.float32)

    x_ptr = x + m[:, None] * x_stride + k[None, :]
    w_ptr = w_rows + k[None, :]
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_ptr + start, mask=has_row, other=0.0)
            b = tl.load(w_ptr + start)
        else:
            inside = (start + k < K)[None, :]
            a = tl.load(x_ptr + start, mask=has_row & inside, other=0.0)
            b = tl.load(w_ptr + start, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)

    if PDL and not EARLY:
        gdc_launch_dependents()
    if NUM_SUMS > 0:
        acc *= scale[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        acc = gate * tl.sigmoid(gate) * up
    if ADD:
        acc += before
    result = acc.to(out.dtype.element_ty)
    tl.store(out_ptr, result, mask=exists)
    if ADD:
        # Of what was stored, which is what the next product reads.
        kept = tl.where(exists, result.to(tl.float32), 0.0)
        sum_ptr = new_sums + tl.program_id(0) * num_rows + m
        tl.store(sum_ptr, tl.sum(kept * kept, 1), mask=m < num_rows)
