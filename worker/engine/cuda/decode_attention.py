"""Attention of decode rows: q/k norm, rotary embedding, KV append and attention in one kernel.

The kernel needs no plan from the host. A tiny kernel run once a step cuts every row's cached
tokens into chunks on the device, from lengths that lie there; its grid depends on the batch
size alone, so a CUDA graph of a decode step stays valid for any lengths. (FlashInfer's decode
reads as fast, but its plan costs about 1 ms of host time at batch 256 and must be copied
before every replay.)

KV pages are laid out [num_pages, num_kv_heads, page_size, head_dim], the layout FlashInfer
calls HND: one head's tokens of a page are contiguous.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.engine.cuda.decode_plan import (
    ITEM_WORDS,
    TILE,
    most_chunks,
    plan_chunks,
    programs_at_once,
)
from worker.engine.cuda.launch import FEW_ROWS, dependent_launch

# log2(e): the softmax is computed with exp2, which is one instruction.
_LOG2E = 1.4426950408889634
# tl.dot needs 16 rows; a group of query heads is padded to that.
_GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a decode attention is compiled for."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """What is still to be done to q and k: optional norm of each head, then rotation."""

    # [max_context, head_dim], cosines in the first half.
    cos_sin: torch.Tensor
    # [head_dim] each, or None where the model has no such norm.
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float


class DecodeWork:
    """The chunks of a step's decode rows, on the device, and the space for partial results.

    All steps share it: they run one after another on the engine's stream.
    """

    def __init__(self, shape: DecodeShape, max_batch: int, device: torch.device) -> None:
        self.shape = shape
        # Chunks that are worked on at once, each by a program for every kv head.
        self._wave = max(1, programs_at_once(device) // shape.num_kv_heads)
        max_items = self.num_items(max_batch)
        # One line for each chunk, all that a program must know of it in one load.
        self.items = torch.zeros(max_items, ITEM_WORDS, dtype=torch.int32, device=device)
        heads, head_dim = shape.num_q_heads, shape.head_dim
        self.partial_out = torch.empty(max_items, heads, head_dim, device=device)
        self.partial_max = torch.empty(max_items, heads, device=device)
        self.partial_sum = torch.empty(max_items, heads, device=device)
        # How many chunks of a (row, kv head) are done; the last one resets it.
        self.arrivals = torch.zeros(max_batch, shape.num_kv_heads, dtype=torch.int32, device=device)

    def num_items(self, batch: int) -> int:
        """The most chunks that a batch can be cut into, whatever its lengths."""
        return most_chunks(batch, self._wave)

    def plan(self, rows: torch.Tensor, cached_lens: torch.Tensor) -> None:
        """Cuts the rows' cached tokens into chunks; both are [batch] int32."""
        plan_chunks(self.items, rows, cached_lens, wave=self._wave)


def decode_attention(
    work: DecodeWork,
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    rotary: Rotary | None,
) -> None:
    """Writes K and V of each row's new token to its page and attends over all its tokens.

    q is [batch, num_q_heads * head_dim], k and v [batch, num_kv_heads * head_dim], their rows
    strided; `rotary` None means that q and k are rotated already. `out` is like q.
    `page_table` is [max_rows + 1, columns] int32.
    """
    shape = work.shape
    has_norm = rotary is not None and rotary.q_norm is not None
    cos_sin = rotary.cos_sin if rotary is not None else q
    _decode_kernel[(shape.num_kv_heads, work.num_items(q.shape[0]))](
        out,
        q,
        k,
        v,
        k_pages,
        v_pages,
        page_table,
        cos_sin,
        rotary.q_norm if rotary is not None and has_norm else q,
        rotary.k_norm if rotary is not None and has_norm else q,
        work.items,
        work.partial_out,
        work.partial_max,
        work.partial_sum,
        work.arrivals,
        page_table.stride(0),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        rotary.norm_eps if rotary is not None else 0.0,
        shape.head_dim**-0.5 * _LOG2E,
        HAS_NORM=has_norm,
        HAS_ROPE=rotary is not None,
        NUM_Q_HEADS=shape.num_q_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        PAGE_SIZE=shape.page_size,
        GROUP_ROWS=_GROUP_ROWS,
        BLOCK_N=32,
        COMBINED=16,
        ITEM_WORDS=ITEM_WORDS,
        TILE=TILE,
        EARLY=q.shape[0] > FEW_ROWS,
        # Many small programs on a multiprocessor hide each other's waits: of eight shapes of
        # tile this was the best from batch 1 to 128, and within 1 % of it at 256.
        num_warps=1,
        num_stages=4,
        **dependent_launch(),
    )


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]  # noqa: C901 - Triton has no closures
    out,
    q_new,
    k_new,
    v_new,
    k_pages,
    v_pages,
    page_table,
    cos_sin,
    q_norm,
    k_norm,
    items,
    partial_out,
    partial_max,
    partial_sum,
    arrivals,
    page_table_stride,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    norm_eps,
    softmax_scale,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMBINED: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0)
    item = tl.program_id(1)
    line = items + item * ITEM_WORDS
    b = tl.load(line)
    row = tl.load(line + 1)
    cached_len = tl.load(line + 2)
    begin = tl.load(line + 3)
    end = tl.load(line + 4)
    first = tl.load(line + 5)
    num_chunks = tl.load(line + 6)
    if b < 0:
        return
    table = page_table + row.to(tl.int64) * page_table_stride
    is_last_chunk = item - first == num_chunks - 1
    if PDL:
        gdc_wait()

    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HEAD_DIM)
    g = tl.arange(0, GROUP_ROWS)
    partner = (d + HALF) % HEAD_DIM
    dtype = q_new.dtype.element_ty
    if HAS_ROPE:
        cos = tl.load(cos_sin + cached_len * HEAD_DIM + d % HALF).to(tl.float32)
        sin = tl.load(cos_sin + cached_len * HEAD_DIM + HALF + d % HALF).to(tl.float32)
        sin = tl.where(d < HALF, -sin, sin)

    # Queries of this kv head's group: [GROUP_ROWS, HEAD_DIM], rows from GROUP on are zero.
    q_base = q_new + b * q_stride + (head * GROUP + g[:, None]) * HEAD_DIM
    in_group = (g < GROUP)[:, None]
    q = tl.load(q_base + d[None, :], mask=in_group, other=0.0)
    if HAS_ROPE:
        wide = q.to(tl.float32)
        across = tl.load(q_base + partner[None, :], mask=in_group, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + norm_eps)[:, None]
            wide = wide * scale * tl.load(q_norm + d).to(tl.float32)[None, :]
            across = across * scale * tl.load(q_norm + partner).to(tl.float32)[None, :]
        q = (wide * cos[None, :] + across * sin[None, :]).to(dtype)

    highest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total_weight = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
    if is_last_chunk:
        # The new token: appended to its page, and the first term of this chunk's softmax.
        k_base = k_new + b * k_stride + head * HEAD_DIM
        own_k = tl.load(k_base + d)
        if HAS_ROPE:
            wide_k = own_k.to(tl.float32)
            across_k = tl.load(k_base + partner).to(tl.float32)
            if HAS_NORM:
                scale_k = tl.rsqrt(tl.sum(wide_k * wide_k, 0) / HEAD_DIM + norm_eps)
                wide_k = wide_k * scale_k * tl.load(k_norm + d).to(tl.float32)
                across_k = across_k * scale_k * tl.load(k_norm + partner).to(tl.float32)
            own_k = (wide_k * cos + across_k * sin).to(dtype)
        own_v = tl.load(v_new + b * v_stride + head * HEAD_DIM + d)
        own_page = tl.load(table + cached_len // PAGE_SIZE).to(tl.int64)
        slot = ((own_page * NUM_KV_HEADS + head) * PAGE_SIZE + cached_len % PAGE_SIZE) * HEAD_DIM
        tl.store(k_pages + slot + d, own_k)
        tl.store(v_pages + slot + d, own_v)
        highest = tl.sum(q.to(tl.float32) * own_k.to(tl.float32)[None, :], 1) * softmax_scale
        total_weight += 1.0
        acc += own_v.to(tl.float32)[None, :]

    n = tl.arange(0, BLOCK_N)
    head_offset = head * PAGE_SIZE * HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        position = start + n
        valid = position < end
        page = tl.load(table + position // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        offset = page * (NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM) + head_offset
        offset += (position % PAGE_SIZE) * HEAD_DIM
        k = tl.load(k_pages + offset[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(v_pages + offset[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * softmax_scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total_weight = total_weight * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = new_highest

    if PDL and not EARLY:
        gdc_launch_dependents()
    heads = head * GROUP + g
    out_ptr = out + b * out_stride + heads[:, None] * HEAD_DIM + d[None, :]
    if num_chunks == 1:
        tl.store(out_ptr, (acc / total_weight[:, None]).to(out.dtype.element_ty), mask=in_group)
    else:
        part = item * NUM_Q_HEADS + heads
        tl.store(partial_out + part[:, None] * HEAD_DIM + d[None, :], acc, mask=in_group)
        tl.store(partial_max + part, highest, mask=g < GROUP)
        tl.store(partial_sum + part, total_weight, mask=g < GROUP)
        # Every thread's stores come before the one thread's release below.
        tl.debug_barrier()
        counter = arrivals + b * NUM_KV_HEADS + head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == num_chunks - 1:
            tl.store(counter, 0)
            # Sixteen chunks at a time, in the order of the chunks: the sum does not depend on
            # who came last, and its loads do not wait for each other.
            c = tl.arange(0, COMBINED)
            for query in tl.static_range(GROUP):
                best = float("-inf")
                weight_sum = 0.0
                combined = tl.zeros([HEAD_DIM], tl.float32)
                for i in range(0, num_chunks, COMBINED):
                    part = (first + i + c) * NUM_Q_HEADS + head * GROUP + query
                    exists = i + c < num_chunks
                    # .cg: what other multiprocessors wrote is not in this one's L1.
                    chunk_max = tl.load(
                        partial_max + part, exists, float("-inf"), cache_modifier=".cg"
                    )
                    chunk_sum = tl.load(partial_sum + part, exists, 0.0, cache_modifier=".cg")
                    chunk_out = tl.load(
                        partial_out + part[:, None] * HEAD_DIM + d[None, :],
                        exists[:, None],
                        0.0,
                        cache_modifier=".cg",
                    )
                    new_best = tl.maximum(best, tl.max(chunk_max, 0))
                    decay = tl.exp2(best - new_best)
                    weight = tl.exp2(chunk_max - new_best)
                    weight_sum = weight_sum * decay + tl.sum(chunk_sum * weight, 0)
                    combined = combined * decay + tl.sum(chunk_out * weight[:, None], 0)
                    best = new_best
                query_out = out + b * out_stride + (head * GROUP + query) * HEAD_DIM
                tl.store(query_out + d, (combined / weight_sum).to(out.dtype.element_ty))
