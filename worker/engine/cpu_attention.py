"""Attention over paged KV in plain torch, made for few and cheap operations a layer.

What all layers share (which slots to read, which scores to mask) is worked out once for a
step, in numpy. Then a layer's decode rows take one gather and two batched products for
each group of rows of similar length, and each prefill chunk one fused attention.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.kv_pool import KVPool
from worker.models.config import ModelConfig
from worker.step import Int32Array, Int64Array, StepPlan

# Splitting off a group of rows costs about as much as gathering this many padded tokens
# (50 µs against 0.1 µs a token and layer of SmolLM2, 2-core EPYC).
_WORTH_SPLITTING_TOKENS = 512
# Gathered KV is read right after it is written: more than this leaves the cache.
_GROUP_BYTES = 16 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows whose KV is gathered together, padded to the longest."""

    # Places of the rows among the step's tokens; None: all decode rows, in order.
    rows: Tensor | None
    num_rows: int
    length: int
    # [num_rows * num_kv_heads * 2 * length] rows of the pool seen as [.., head_dim].
    index: Tensor
    # [num_rows * num_kv_heads, 1, length], -inf behind a row's end.
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one row: a prefill chunk, or a lone decode row."""

    start: int
    end: int
    # Tokens to attend to, those of the span included.
    length: int
    # The row's slots; None: those from the first on, without gaps.
    slots: Tensor | None
    first_slot: int
    # [end - start, length], False where a token must not look; None: nowhere, or causal.
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's reading and writing of KV."""

    # [num_tokens] slots that take the step's own keys and values.
    slots: Tensor
    groups: tuple[DecodeGroup, ...]
    spans: tuple[Span, ...]


class PagedAttention:
    """`Attend` for the CPU: over the pool, by the plan that `use` was given last."""

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._group_size = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim
        self._out_size = config.num_heads * config.head_dim
        self._scale = config.head_dim**-0.5
        self._by_token = [layer.flatten(1) for layer in pool.layers]
        self._by_head = [layer.view(-1, config.head_dim) for layer in pool.layers]
        self._layers = pool.layers
        # Gathered KV, shared by all layers: fresh memory of this size costs page faults.
        self._workspace = pool.layers[0].new_empty(0)
        self._plan: AttentionPlan | None = None

    def use(self, plan: AttentionPlan) -> None:
        """Makes room for the plan, which holds for the calls that follow."""
        self._plan = plan
        sizes = [len(group.index) * self._head_dim for group in plan.groups]
        wanted = max(sizes, default=0)
        if wanted > len(self._workspace):
            self._workspace = self._workspace.new_empty(wanted + wanted // 4)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        plan = self._plan
        assert plan is not None
        self._by_token[layer].index_copy_(0, plan.slots, kv.flatten(1))
        if not plan.spans and len(plan.groups) == 1 and plan.groups[0].rows is None:
            return self._decode(layer, q, plan.groups[0])
        if len(plan.spans) == 1 and not plan.groups:
            return self._extend(layer, q, plan.spans[0])
        out = q.new_empty(len(q), self._out_size)
        for group in plan.groups:
            if group.rows is None:
                out[: group.num_rows] = self._decode(layer, q[: group.num_rows], group)
            else:
                out[group.rows] = self._decode(layer, q.index_select(0, group.rows), group)
        for span in plan.spans:
            out[span.start : span.end] = self._extend(layer, q[span.start : span.end], span)
        return out

    def _decode(self, layer: int, q: Tensor, group: DecodeGroup) -> Tensor:
        """[num_rows, num_heads * head_dim] for one query of each row.

        The query heads that share a KV head are the rows of one product.
        """
        room = self._workspace[: len(group.index) * self._head_dim].view(-1, self._head_dim)
        gathered = torch.index_select(self._by_head[layer], 0, group.index, out=room)
        k, v = gathered.view(-1, 2, group.length, self._head_dim).unbind(1)
        folded = q.reshape(-1, self._group_size, self._head_dim)
        if q.dtype != torch.float32:
            # A score kept in bfloat16 would be off by up to 0.4 %; this keeps it in float32.
            out = F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask.to(q.dtype))
            return out.view(group.num_rows, self._out_size)
        scores = torch.baddbmm(group.mask, folded, k.transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), v).view(group.num_rows, self._out_size)

    def _extend(self, layer: int, q: Tensor, span: Span) -> Tensor:
        """[end - start, num_heads * head_dim] for the queries of one row."""
        if span.slots is not None:
            kv = self._layers[layer].index_select(0, span.slots)
        else:
            kv = self._layers[layer][span.first_slot : span.first_slot + span.length]
        k, v = kv.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        if len(q) == 1:
            folded = q.reshape(1, self._num_kv_heads, self._group_size, self._head_dim)
            return F.scaled_dot_product_attention(folded, k, v).view(1, self._out_size)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=span.mask,
            is_causal=span.is_causal,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).reshape(len(q), self._out_size)


class AttentionPlanner:
    """Turns step plans into attention plans; holds the engine's copy of the page table."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        page_size: int,
        max_rows: int,
        max_context: int,
    ) -> None:
        self._config = config
        self._page_size = page_size
        num_columns = -(-max_context // page_size)
        self._page_table = np.zeros((max_rows, num_columns), np.int32)
        token_bytes = 2 * config.num_kv_heads * config.head_dim * _FLOAT_BYTES
        self._group_tokens = _GROUP_BYTES // token_bytes

    def plan(self, step: StepPlan, positions: Int64Array) -> AttentionPlan:
        """Takes over the plan's page updates. positions [num_tokens] of the step's tokens."""
        self._page_table[step.page_rows, step.page_columns] = step.page_ids
        token_rows = np.repeat(step.rows, step.extend_lens)
        lengths = step.cached_lens + step.extend_lens
        num_decode = step.num_decode
        groups: list[DecodeGroup] = []
        spans: list[Span] = []
        if num_decode == 1:
            spans.append(self._span(int(step.rows[0]), 0, 1, int(lengths[0])))
        elif num_decode > 1:
            groups = self._groups(step.rows[:num_decode], lengths[:num_decode])
        start = num_decode
        for i in range(num_decode, step.num_rows):
            end = start + int(step.extend_lens[i])
            spans.append(self._span(int(step.rows[i]), start, end, int(lengths[i])))
            start = end
        slots = self._slots(token_rows, positions)
        return AttentionPlan(torch.from_numpy(slots), tuple(groups), tuple(spans))

    def _groups(self, rows: Int32Array, lengths: Int32Array) -> list[DecodeGroup]:
        order = np.argsort(lengths, kind="stable")
        borders = _group_borders(lengths[order], self._group_tokens)
        if len(borders) == 1:
            return [self._group(rows, lengths, None)]
        starts = [0, *borders[:-1]]
        members = [order[start:end] for start, end in zip(starts, borders, strict=True)]
        return [self._group(rows[m], lengths[m], torch.from_numpy(m)) for m in members]

    def _group(self, rows: Int32Array, lengths: Int32Array, places: Tensor | None) -> DecodeGroup:
        heads = self._config.num_kv_heads
        longest = int(lengths.max())
        columns = np.arange(longest)
        # Behind a row's end its own last slot is read once more: finite, and then masked.
        positions = np.minimum(columns, lengths[:, None] - 1)
        slots = self._slots(rows[:, None], positions)
        # Row-major over [row, head, key or value, position]: each head's keys lie together.
        kinds = np.arange(2)[:, None] * heads
        index = slots[:, None, None, :] * (2 * heads) + kinds + np.arange(heads)[:, None, None]
        mask = np.where(columns < lengths[:, None], np.float32(0), np.float32(-math.inf))
        spread = np.repeat(mask[:, None, :], heads, axis=0).reshape(-1, 1, longest)
        return DecodeGroup(
            rows=places,
            num_rows=len(rows),
            length=longest,
            index=torch.from_numpy(index.reshape(-1)),
            mask=torch.from_numpy(spread),
        )

    def _span(self, row: int, start: int, end: int, length: int) -> Span:
        pages = self._page_table[row, : -(-length // self._page_size)]
        is_run = bool((pages[1:] - pages[:-1] == 1).all())
        num_new = end - start
        mask = None
        if 1 < num_new < length:
            visible = np.arange(length) <= np.arange(length - num_new, length)[:, None]
            mask = torch.from_numpy(visible)
        return Span(
            start=start,
            end=end,
            length=length,
            slots=None if is_run else torch.from_numpy(self._slots_of(row, length)),
            first_slot=int(pages[0]) * self._page_size,
            mask=mask,
            is_causal=1 < num_new == length,
        )

    def _slots_of(self, row: int, length: int) -> Int64Array:
        return self._slots(np.full(length, row), np.arange(length))

    def _slots(self, rows: NDArray[np.integer], positions: NDArray[np.integer]) -> Int64Array:
        pages = self._page_table[rows, positions // self._page_size].astype(np.int64)
        slots: Int64Array = pages * self._page_size + positions % self._page_size
        return slots


def _group_borders(lengths: Int32Array, most_tokens: int) -> list[int]:
    """Where groups of ascending lengths end, so that little is padded and all fits."""
    borders: list[int] = []
    start = 0
    for i in range(1, len(lengths)):
        members = i - start
        padded = members * int(lengths[i] - lengths[i - 1])
        if padded > _WORTH_SPLITTING_TOKENS or (members + 1) * int(lengths[i]) > most_tokens:
            borders.append(i)
            start = i
    return [*borders, len(lengths)]
