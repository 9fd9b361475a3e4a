"""The models' arithmetic on an NVIDIA GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.cuda import kernels
from worker.engine.cuda.decode_attention import Rotary
from worker.engine.cuda.linear import MOST_COLUMNS, MOST_ROWS, small_linear
from worker.engine.cuda.product import RowSquares, is_faster, product, product_add, suits
from worker.models.ops import Norm, Rotation


class CudaOps:
    """`worker.models.ops.Ops`; leaves to the kernels that follow what they can do on the way.

    The attention kernels read q and k once and norm and rotate them as they do, which saves
    two kernels a layer. So `head_norm` and `rotate` only remember what is to be done, and the
    engine's `attend`, which a layer calls next, collects it with `take`. Likewise `linear_add`
    of a few rows remembers their squares, of which the next norm of the same rows is made.
    """

    def __init__(self) -> None:
        self._norm: tuple[Tensor, float] | None = None
        self._rotation: Rotation | None = None
        # A residual stream and the squares of its rows.
        self._squares: tuple[Tensor, Tensor] | None = None

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

    def fold(self, gain: Tensor, weight: Tensor) -> None:
        if suits(weight.shape[1]):
            weight.mul_(gain)
            gain.fill_(1.0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] <= MOST_ROWS and weight.shape[0] <= MOST_COLUMNS:
            return small_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        self._squares = None
        return kernels.rms_norm(x, *norm)

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_fused(x):
            return product(x, weight, bias, squares=self._squares_of(x, norm))
        return self.linear(self.rms_norm(x, norm), weight, bias)

    def norm_gated_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        if self._is_fused(x):
            return product(x, weight, None, squares=self._squares_of(x, norm), gated=True)
        return kernels.silu_mul(self.linear(self.rms_norm(x, norm), weight, None))

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        if self._is_fused(residual):
            self._squares = (residual, product_add(x, weight, bias, residual))
            return residual
        self._squares = None
        if x.shape[0] <= MOST_ROWS:
            return small_linear(x, weight, bias, residual)
        if bias is not None:
            residual.add_(bias)
        return residual.addmm_(x, weight.t())

    def head_norm(self, qk: Tensor, weight: Tensor, eps: float) -> None:
        self._norm = (weight, eps)

    def rotary_table(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        # In float32 whatever the model's dtype: the kernels compute in float32 anyway.
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def rotation(self, table: Tensor, positions: Tensor) -> Rotation:
        return table, positions

    def rotate(self, qk: Tensor, rotation: Rotation) -> None:
        self._rotation = rotation

    def _is_fused(self, residual: Tensor) -> bool:
        num_rows, hidden_size = residual.shape
        return is_faster(num_rows, hidden_size)

    def _squares_of(self, x: Tensor, norm: Norm) -> RowSquares:
        """Of the last `linear_add`, or computed, at the start of a model."""
        remembered, self._squares = self._squares, None
        if remembered is not None and remembered[0] is x:
            return RowSquares(remembered[1], norm[1])
        return RowSquares(kernels.row_squares(x), norm[1])
