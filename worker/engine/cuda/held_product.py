"""Matrix products of at most 16 rows, whose programs hold their weights before they may start.

They do what `product.py` does. There a program streams its weights past its rows, which wait
for the kernel before; of that loop's time in a small batch, all but the arithmetic is waiting
for memory, once for each stretch of k. Here a program has few columns, and all their weights
lie in its shared memory by the time the kernel before it ends. What it then waits for is its
rows, all of which it asks for at once, and the sum over k is cut among its warps.

Since every kernel of this kind lets the next one start as soon as its own weights are there,
weights flow while the chain of products computes: 18 us for a layer's four in Qwen3-0.6B at 8
rows, 30 us with streamed weights.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.engine.cuda.launch import dependent_launch

# At 32 rows, streaming is as fast.
_MOST_ROWS = 16
# Elements of k that are loaded at once, and the most such chunks: 16 columns of three are 96 KiB.
_CHUNK = 1024
_MOST_CHUNKS = 3


def holds(num_rows: int, k: int) -> bool:
    """Whether a program's weights and rows fit in its shared memory and registers."""
    return num_rows <= _MOST_ROWS and k <= _CHUNK * _MOST_CHUNKS


def choose_columns(n: int, *, gated: bool) -> int:
    """Columns of a program, the fastest of four for each product of Qwen3-0.6B on an H200."""
    return 32 if n >= 4096 and not gated else 16


def held_product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    sums: torch.Tensor | None,
    eps: float,
    new_sums: torch.Tensor | None,
    gated: bool,
) -> None:
    """Writes the product to `out`; with `new_sums`, adds it, and writes the new rows' squares.

    For `sums` and `new_sums`, [num_tiles, num_rows], and `gated` see `product.py`.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    columns = choose_columns(n, gated=gated)
    chunk = min(_CHUNK, triton.next_power_of_2(k))
    # Warps of a program, each of which sums over its own part of k. Four would have to spill
    # the rows of three chunks.
    ways = 4 if k <= 2 * _CHUNK else 8
    num_sums = 0 if sums is None else sums.shape[0]
    _held_kernel[(triton.cdiv(n, columns),)](
        out,
        x,
        weight,
        bias if bias is not None else x,
        sums if sums is not None else x,
        new_sums if new_sums is not None else x,
        num_rows,
        x.stride(0),
        eps,
        N=n,
        K=k,
        NUM_SUMS=num_sums,
        BLOCK_SUMS=triton.next_power_of_2(max(num_sums, 1)),
        HAS_BIAS=bias is not None,
        GATED=gated,
        ADD=new_sums is not None,
        ROWS=max(8, triton.next_power_of_2(num_rows)),
        BLOCK_N=columns,
        WAYS=ways,
        DEPTH=chunk // ways,
        CHUNKS=triton.cdiv(k, chunk),
        num_warps=ways,
        **dependent_launch(),
    )


@triton.jit
def _load(pointers, is_inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is beyond the end of a row of weights is 0."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _held_kernel(  # type: ignore[no-untyped-def]  # noqa: C901 - Triton has no closures
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
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAYS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    STEP: tl.constexpr = WAYS * DEPTH
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, ROWS)
    # Everything of one chunk is [WAYS, columns or rows, DEPTH].
    k = tl.arange(0, WAYS)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    # Columns beyond the edge read the last one instead of nothing.
    w_ptr = weight + tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K + k
    # Triton puts operands of a product into shared memory where they are loaded.
    WHOLE: tl.constexpr = K % STEP == 0
    w_chunks = ()
    for i in tl.static_range(CHUNKS):
        w_chunks += (_load(w_ptr + i * STEP, i * STEP + k < K, WHOLE),)  # type: ignore[assignment]
    if GATED:
        u_chunks = ()
        for i in tl.static_range(CHUNKS):
            u_ptr = w_ptr + N * K + i * STEP
            u_chunks += (_load(u_ptr, i * STEP + k < K, WHOLE),)  # type: ignore[assignment]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    has_row = r < num_rows
    exists = (n < N)[:, None] & has_row[None, :]
    out_ptr = out + r[None, :].to(tl.int64) * N + n[:, None]
    row_mask = has_row[None, :, None]
    x_ptr = x + r[None, :, None] * x_stride + k
    x_chunks = ()
    for i in tl.static_range(CHUNKS):
        is_inside = row_mask if WHOLE else row_mask & (i * STEP + k < K)
        chunk = tl.load(x_ptr + i * STEP, mask=is_inside, other=0.0)
        x_chunks += (chunk,)  # type: ignore[assignment]
    if NUM_SUMS > 0:
        t = tl.arange(0, BLOCK_SUMS)
        parts = tl.load(
            sums + t[:, None] * num_rows + r[None, :],
            mask=(t < NUM_SUMS)[:, None] & has_row[None, :],
            other=0.0,
        )
        scale = tl.rsqrt(tl.sum(parts, 0) / K + eps)
    if ADD:
        before = tl.load(out_ptr, mask=exists, other=0.0).to(tl.float32)
    acc = tl.zeros([WAYS, BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([WAYS, BLOCK_N, ROWS], tl.float32)
    for i in tl.static_range(CHUNKS):
        # Selected once more, which changes nothing, or Triton would put each chunk into shared
        # memory, and wait for it, before it loads the next.
        rows = tl.permute(tl.where(row_mask, x_chunks[i], 0.0), (0, 2, 1))
        acc = tl.dot(w_chunks[i], rows, acc)
        if GATED:
            up = tl.dot(u_chunks[i], rows, up)

    y = tl.sum(acc, 0)
    if NUM_SUMS > 0:
        y *= scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y_up = tl.sum(up, 0)
        if NUM_SUMS > 0:
            y_up *= scale[None, :]
        y = y * tl.sigmoid(y) * y_up
    if ADD:
        y += before
    result = y.to(out.dtype.element_ty)
    tl.store(out_ptr, result, mask=exists)
    if ADD:
        # Of what was stored, which is what the next product reads.
        kept = tl.where(exists, result.to(tl.float32), 0.0)
        sum_ptr = new_sums + tl.program_id(0) * num_rows + r
        tl.store(sum_ptr, tl.sum(kept * kept, 0), mask=has_row)
