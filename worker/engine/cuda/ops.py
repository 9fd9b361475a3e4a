"""The models' arithmetic on an NVIDIA GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.cuda import kernels
from worker.engine.cuda.decode_attention import Rotary
from worker.engine.cuda.linear import MOST_COLUMNS, MOST_ROWS, small_linear
from worker.models.ops import Rotation


class CudaOps:
    """`worker.models.ops.Ops`, with q/k norm and rotation left to the attention.

    The attention kernels read q and k once and norm and rotate them as they do, which
    saves two kernels a layer. So `head_norm` and `rotate` only remember what is to be
    done, and the engine's `attend`, which a layer calls next, collects it with `take`.
    """

    def __init__(self) -> None:
        self._norm: tuple[Tensor, float] | None = None
        self._rotation: Rotation | None = None

    def take(self, num_q_heads: int) -> Rotary:
        """What the calling layer has asked for since the last `take`."""
        assert self._rotation is not None, "a layer rotates before it attends"
        (table, _), norm = self._rotation, self._norm
        self._rotation = self._norm = None
        if norm is None:
            return Rotary(table, None, None, 0.0)
        weight, eps = norm
        return Rotary(table, weight[0], weight[num_q_heads], eps)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] <= MOST_ROWS and weight.shape[0] <= MOST_COLUMNS:
            return small_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, residual, weight, eps), residual

    def head_norm(self, qk: Tensor, weight: Tensor, eps: float) -> None:
        self._norm = (weight, eps)

    def rotary_table(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        # In float32 whatever the model's dtype: the kernels compute in float32 anyway.
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def rotation(self, table: Tensor, positions: Tensor) -> Rotation:
        return table, positions

    def rotate(self, qk: Tensor, rotation: Rotation) -> None:
        self._rotation = rotation

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return kernels.silu_mul(gate_up)
