"""What the engine gives a model as `attend`, for decode steps and for steps with prefill."""

from dataclasses import dataclass

import flashinfer
import numpy as np
import torch
from torch import Tensor

from worker.engine.cuda.decode_attention import DecodeShape, DecodeWork, Rotary, decode_attention
from worker.engine.cuda.kernels import rotate_and_append
from worker.engine.cuda.ops import CudaOps
from worker.engine.cuda.step_kernels import gather_pages
from worker.step import Int32Array

_FLOAT_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of each layer: [num_pages, num_kv_heads, page_size, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def allocate(
        cls, shape: DecodeShape, *, num_layers: int, num_pages: int, device: torch.device
    ) -> "KVPages":
        """Zeros: pages that nobody has written must be finite, for they are masked, not skipped."""
        size = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        keys, values = (
            [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(num_layers)]
            for _ in range(2)
        )
        return cls(keys, values)


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows on the device, [num_rows] int32 each, and the table they point into."""

    rows: Tensor
    cached_lens: Tensor
    page_table: Tensor


class DecodeAttend:
    """Attention of a step (or the first rows of a step) in which each row has one token."""

    def __init__(self, ops: CudaOps, pages: KVPages, work: DecodeWork, step: StepRows) -> None:
        """Queues the cutting of the rows' KV into chunks."""
        self._ops = ops
        self._pages = pages
        self._work = work
        self._page_table = step.page_table
        work.plan(step.rows, step.cached_lens)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        self.into(out, layer, q, kv, self._ops.take(q.shape[1]))
        return out

    def into(self, out: Tensor, layer: int, q: Tensor, kv: Tensor, rotary: Rotary) -> None:
        num_kv_heads = kv.shape[1] // 2
        decode_attention(
            self._work,
            out,
            q.flatten(1),
            kv[:, :num_kv_heads].flatten(1),
            kv[:, num_kv_heads:].flatten(1),
            k_pages=self._pages.keys[layer],
            v_pages=self._pages.values[layer],
            page_table=self._page_table,
            rotary=rotary,
        )


class PrefillAttention:
    """FlashInfer's paged prefill, planned anew for every step that has prefill rows.

    Two wrappers take turns: `plan` writes a pinned buffer that the wrapper owns and copies
    it on the stream, so it must not be planned again before that copy has run.
    """

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        workspace = torch.zeros(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns = [
            (flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND"), torch.cuda.Event())
            for _ in range(2)
        ]

    def plan(self, cached_lens: Int32Array, extend_lens: Int32Array, step: StepRows) -> "Prefill":
        """Prepares the step's prefill rows, in the stream that will run them."""
        self._turns.reverse()
        wrapper, copied = self._turns[0]
        copied.synchronize()
        shape, num_rows = self._shape, len(extend_lens)
        lens = cached_lens + extend_lens
        num_pages = -(-lens // shape.page_size)
        # Pinned, so that FlashInfer's copies of them do not stop the host.
        host = torch.empty(3, num_rows + 1, dtype=torch.int32, pin_memory=True)
        qo_indptr, kv_indptr, last_page_lens = host.numpy()
        qo_indptr[0] = kv_indptr[0] = 0
        np.cumsum(extend_lens, out=qo_indptr[1:])
        np.cumsum(num_pages, out=kv_indptr[1:])
        last_page_lens[:num_rows] = (lens - 1) % shape.page_size + 1
        page_ids = torch.empty(int(kv_indptr[-1]), dtype=torch.int32, device=self._device)
        indptr = host[1].to(self._device, non_blocking=True)
        gather_pages(page_ids, indptr, step.rows, step.page_table)
        wrapper.plan(
            host[0],
            host[1],
            page_ids,
            host[2, :num_rows],
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        copied.record()
        return Prefill(wrapper)


@dataclass(frozen=True, slots=True)
class Prefill:
    """One step's planned prefill rows."""

    _wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Causal attention of q [num_tokens, num_q_heads, head_dim] into out, which is like it."""
        self._wrapper.run(q, (keys, values), out=out)


class MixedAttend:
    """Attention of a step with prefill rows, and maybe decode rows before them."""

    def __init__(
        self,
        ops: CudaOps,
        shape: DecodeShape,
        pages: KVPages,
        *,
        num_decode: int,
        decode: DecodeAttend | None,
        prefill: Prefill,
        slots: Tensor,
        positions: Tensor,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._pages = pages
        self._num_decode = num_decode
        self._decode = decode
        self._prefill = prefill
        self._slots = slots[num_decode:]
        self._positions = positions[num_decode:]

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        num_tokens, num_q_heads, head_dim = q.shape
        rotary = self._ops.take(num_q_heads)
        first = self._num_decode
        out = q.new_empty(num_tokens, num_q_heads * head_dim)
        if self._decode is not None:
            self._decode.into(out[:first], layer, q[:first], kv[:first], rotary)
        rotated = q.new_empty(num_tokens - first, num_q_heads, head_dim)
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        rotate_and_append(
            rotated,
            q[first:],
            kv[first:],
            keys,
            values,
            self._shape,
            token_slots=self._slots,
            positions=self._positions,
            rotary=rotary,
        )
        self._prefill.run(rotated, keys, values, out[first:].view(rotated.shape))
        return out
