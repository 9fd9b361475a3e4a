"""Triton kernels for the element-wise parts of a forward.

Each reads its inputs once and computes in float32. FlashInfer has the same functions, but
compiles each with nvcc at first use (35 s for the norms); these take a second together.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.engine.cuda.decode_attention import DecodeShape, Rotary
from worker.engine.cuda.launch import dependent_launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each row of [num_tokens, hidden]; returns a new tensor."""
    out = torch.empty_like(x)
    num_tokens, hidden = x.shape
    _norm_kernel[(num_tokens,)](
        out,
        x,
        weight,
        x.stride(0),
        hidden,
        eps,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=4 if hidden <= 4096 else 8,
        **dependent_launch(),
    )
    return out


def row_squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row's squares of [num_tokens, hidden]: [1, num_tokens] float32."""
    num_tokens, hidden = x.shape
    out = torch.empty(1, num_tokens, dtype=torch.float32, device=x.device)
    _row_squares_kernel[(num_tokens,)](
        out,
        x,
        x.stride(0),
        hidden,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=4,
        **dependent_launch(),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [num_tokens, 2 * size], whose first half is the gate."""
    num_tokens, width = gate_up.shape
    size = width // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        out, gate_up, size, gate_up.stride(0), BLOCK=block, num_warps=4, **dependent_launch()
    )
    return out


def rotate_and_append(
    rotated_q: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    shape: DecodeShape,
    *,
    token_slots: torch.Tensor,
    positions: torch.Tensor,
    rotary: Rotary,
) -> None:
    """q/k norm and rotary embedding of prefill tokens; K and V go to their slots.

    q is [num_tokens, num_q_heads, head_dim] and kv [num_tokens, 2 * num_kv_heads, head_dim],
    both views of one joint projection in which they are neighbours; slots and positions are
    [num_tokens] int32.
    """
    num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
    assert (
        q.stride(0) == kv.stride(0)
        and kv.data_ptr() - q.data_ptr() == q.element_size() * q[0].numel()
    )
    block = min(triton.next_power_of_2(num_heads), 8)
    has_norm = rotary.q_norm is not None
    _rotate_and_append_kernel[(q.shape[0], triton.cdiv(num_heads, block))](
        rotated_q,
        q,
        k_pages,
        v_pages,
        token_slots,
        positions,
        rotary.cos_sin,
        rotary.q_norm if has_norm else q,
        rotary.k_norm if has_norm else q,
        q.stride(0),
        rotary.norm_eps,
        HAS_NORM=has_norm,
        NUM_Q_HEADS=shape.num_q_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=shape.page_size,
        BLOCK_H=block,
        num_warps=2,
    )


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    out,
    x,
    weight,
    x_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    tl.store(out + row * hidden + column, (value * scale * gain).to(out.dtype.element_ty), mask)


@triton.jit
def _row_squares_kernel(  # type: ignore[no-untyped-def]
    out, x, x_stride, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(value * value, 0))


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    out, gate_up, size, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["token_slots", "positions"])
def _rotate_and_append_kernel(  # type: ignore[no-untyped-def]
    q_out,
    qkv,
    k_pages,
    v_pages,
    token_slots,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    qkv_stride,
    norm_eps,
    HAS_NORM: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_Q_HEADS + NUM_KV_HEADS
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, HEAD_DIM)
    partner = (d + HALF) % HEAD_DIM
    exists = (h < NUM_ROTATED + NUM_KV_HEADS)[:, None]
    base = qkv + token * qkv_stride + h[:, None] * HEAD_DIM
    raw = tl.load(base + d[None, :], mask=exists, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(base + partner[None, :], mask=exists, other=0.0).to(tl.float32)
    is_q = (h < NUM_Q_HEADS)[:, None]
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + norm_eps)[:, None]
        q_gain = tl.load(q_norm + d).to(tl.float32)[None, :]
        k_gain = tl.load(k_norm + d).to(tl.float32)[None, :]
        q_gain_partner = tl.load(q_norm + partner).to(tl.float32)[None, :]
        k_gain_partner = tl.load(k_norm + partner).to(tl.float32)[None, :]
        x = x * scale * tl.where(is_q, q_gain, k_gain)
        y = y * scale * tl.where(is_q, q_gain_partner, k_gain_partner)
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * HEAD_DIM + d % HALF)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + d % HALF)[None, :]
    sign = tl.where(d < HALF, -1.0, 1.0)[None, :]
    rotated = (x * cos + sign * y * sin).to(raw.dtype)

    q_ptr = q_out + (token * NUM_Q_HEADS + h[:, None]) * HEAD_DIM + d[None, :]
    tl.store(q_ptr, rotated, mask=is_q)
    slot = tl.load(token_slots + token).to(tl.int64)
    page = slot // PAGE_SIZE
    kv_head = (h - NUM_Q_HEADS) % NUM_KV_HEADS
    kv_offset = (page * NUM_KV_HEADS + kv_head[:, None]) * PAGE_SIZE + slot % PAGE_SIZE
    kv_offset = kv_offset * HEAD_DIM + d[None, :]
    is_k = (h >= NUM_Q_HEADS)[:, None] & (h < NUM_ROTATED)[:, None]
    is_v = (h >= NUM_ROTATED)[:, None] & exists
    tl.store(k_pages + kv_offset, rotated, mask=is_k)
    tl.store(v_pages + kv_offset, raw, mask=is_v)
