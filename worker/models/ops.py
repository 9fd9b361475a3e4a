"""The few operations that one device has fused and another has not.

The models are written against `Ops`; `TorchOps` is the reference and serves the CPU.
Everything here works on [num_tokens, …] tensors of one dtype; there is no batch axis.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# What one step needs to rotate its tokens; made by `Ops.rotation`, read by `Ops.rotate`.
Rotation = tuple[Tensor, Tensor]
# Gain [size] and epsilon of an RMSNorm.
Norm = tuple[Tensor, float]


class Ops(Protocol):
    """Arithmetic of a decoder layer. May write into its arguments where it says so."""

    def pack(self, weight: Tensor) -> Tensor:
        """The weight [out, in] in the layout that `linear` is fastest with."""
        ...

    def fold(self, gain: Tensor, weight: Tensor) -> None:
        """May move a norm's gain into the unpacked weight that alone reads the norm, in place."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] times a packed weight: [n, out]."""
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of the norm of x, which stays as it is."""
        ...

    def norm_gated_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        """silu of the first half of `norm_linear`'s last axis, times the second half."""
        ...

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """residual + `linear`; `residual` may be overwritten."""
        ...

    def head_norm(self, qk: Tensor, weight: Tensor, eps: float) -> None:
        """RMSNorm, in place, of each head of qk [n, heads, head_dim]; weight [heads, head_dim].

        qk may be a strided view.
        """
        ...

    def rotary_table(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        """The device's table, for a model of dtype, of angles [max_context, head_dim / 2]."""
        ...

    def rotation(self, table: Tensor, positions: Tensor) -> Rotation:
        """What `rotate` needs for tokens at positions [n]; once for a step."""
        ...

    def rotate(self, qk: Tensor, rotation: Rotation) -> None:
        """Rotary embedding, in place, of qk [n, heads, head_dim], which may be a strided view."""
        ...


class TorchOps:
    """Plain torch, for any device. With `prepack`, float32 weights go to oneDNN's layout.

    Prepacked, SmolLM2's products take 0.43 of the time of `F.linear` at one row, 0.37 at
    16 and about 0.4 in prefill (torch 2.13, 2-core EPYC), for one layout at every size.
    """

    def __init__(self, *, prepack: bool = False) -> None:
        self._prepack = prepack and _prepack_works()

    def fold(self, gain: Tensor, weight: Tensor) -> None:
        """The gain stays where it is."""

    def pack(self, weight: Tensor) -> Tensor:
        return _prepack(weight) if self._prepack and weight.dtype == torch.float32 else weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.is_mkldnn:
            return _prepacked_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        gain, eps = norm
        return F.rms_norm(x, gain.shape, gain, eps)

    def norm_linear(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(self.rms_norm(x, norm), weight, bias)

    def norm_gated_linear(self, x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
        gate, up = self.norm_linear(x, norm, weight, None).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        return residual.add_(self.linear(x, weight, bias))

    def head_norm(self, qk: Tensor, weight: Tensor, eps: float) -> None:
        torch.mul(F.rms_norm(qk, qk.shape[-1:], None, eps), weight, out=qk)

    def rotary_table(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        # Both halves of cosine, then of sine with rotate-half's minus sign in it.
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)

    def rotation(self, table: Tensor, positions: Tensor) -> Rotation:
        cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    def rotate(self, qk: Tensor, rotation: Rotation) -> None:
        cos, sin = rotation
        halves_swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
        qk.mul_(cos).addcmul_(halves_swapped, sin)


# Rows that the layout is chosen for. Any number above 1 gives the same layout, which
# is good for one row too; the layout for exactly 1 is bad for all others.
_PACK_FOR_ROWS = 16


def _prepack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight, _PACK_FOR_ROWS)
    return packed


def _prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def _prepack_works() -> bool:
    """These operators are torch's own but not public: they are tried before they are used."""
    if not torch._C._has_mkldnn:
        return False
    weight = torch.arange(48 * 32, dtype=torch.float32).view(48, 32) / 1000
    x, bias = weight[:3] + 1, weight[:, 0].contiguous()
    try:
        packed = _prepack(weight)
        return torch.allclose(_prepacked_linear(x, packed, bias), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError, TypeError):
        return False
