"""Small kernels that turn a staged plan into a step's inputs on the device."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def begin_step(
    row_block: torch.Tensor,
    static_block: torch.Tensor,
    updates: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Copies the row block to where graphs read it and sets new page table entries."""
    num_words, num_updates = row_block.numel(), updates.shape[1]
    grid = (triton.cdiv(max(num_words, num_updates), _BLOCK),)
    _begin_kernel[grid](
        row_block,
        static_block,
        updates,
        page_table,
        num_words,
        num_updates,
        page_table.stride(0),
        BLOCK=_BLOCK,
    )


def expand_tokens(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_decode: int,
    rows: torch.Tensor,
    cached_lens: torch.Tensor,
    token_pool: torch.Tensor,
    prefill_token_ids: torch.Tensor,
    prefill_rows: torch.Tensor,
    first_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Input token, position and KV slot of each token of a step, [num_tokens] int32 each.

    The first `num_decode` tokens are decode rows, whose ids come from the token pool.
    """
    num_tokens = len(token_ids)
    _expand_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        token_ids,
        positions,
        slots,
        num_tokens,
        num_decode,
        rows,
        cached_lens,
        token_pool,
        prefill_token_ids,
        prefill_rows,
        first_tokens,
        page_table,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
    )


def gather_pages(
    page_ids: torch.Tensor, indptr: torch.Tensor, rows: torch.Tensor, page_table: torch.Tensor
) -> None:
    """page_ids[indptr[i] : indptr[i + 1]] = the first pages of rows[i]."""
    _gather_pages_kernel[(len(rows),)](
        page_ids, indptr, rows, page_table, page_table.stride(0), BLOCK=_BLOCK
    )


@triton.jit(do_not_specialize=["num_words", "num_updates"])
def _begin_kernel(  # type: ignore[no-untyped-def]
    row_block,
    static_block,
    updates,
    page_table,
    num_words,
    num_updates,
    page_table_stride,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(row_block + i, mask=i < num_words, other=0)
    tl.store(static_block + i, words, mask=i < num_words)
    mask = i < num_updates
    row = tl.load(updates + i, mask=mask, other=0).to(tl.int64)
    column = tl.load(updates + num_updates + i, mask=mask, other=0)
    page = tl.load(updates + 2 * num_updates + i, mask=mask, other=0)
    tl.store(page_table + row * page_table_stride + column, page, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_decode"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    token_ids,
    positions,
    slots,
    num_tokens,
    num_decode,
    rows,
    cached_lens,
    token_pool,
    prefill_token_ids,
    prefill_rows,
    first_tokens,
    page_table,
    page_table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = t < num_tokens
    is_decode = t < num_decode
    is_prefill = exists & (t >= num_decode)
    step_row = tl.load(prefill_rows + t - num_decode, mask=is_prefill, other=0)
    step_row = tl.where(is_decode, t, step_row)
    row = tl.load(rows + step_row, mask=exists, other=0)
    own = tl.load(token_pool + row, mask=is_decode, other=0)
    given = tl.load(prefill_token_ids + t - num_decode, mask=is_prefill, other=0)
    first = tl.load(first_tokens + step_row, mask=exists, other=0)
    position = tl.load(cached_lens + step_row, mask=exists, other=0) + t - first
    entry = row.to(tl.int64) * page_table_stride + position // PAGE_SIZE
    page = tl.load(page_table + entry, mask=exists, other=0)
    tl.store(token_ids + t, tl.where(is_decode, own, given), mask=exists)
    tl.store(positions + t, position, mask=exists)
    tl.store(slots + t, page * PAGE_SIZE + position % PAGE_SIZE, mask=exists)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _gather_pages_kernel(  # type: ignore[no-untyped-def]
    page_ids, indptr, rows, page_table, page_table_stride, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    begin = tl.load(indptr + i)
    count = tl.load(indptr + i + 1) - begin
    source = page_table + tl.load(rows + i).to(tl.int64) * page_table_stride
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        tl.store(page_ids + begin + j, tl.load(source + j, mask=j < count), mask=j < count)
