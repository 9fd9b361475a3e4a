"""What all the decoders are built of.

Weights have the names they have in published checkpoints: each part lists them with
`slots`, as views to be filled, so that loading needs no second copy of the model.

The parts are plain callables and not `nn.Module`s. Nothing of a module is needed here
(no gradients, no hooks, no moving between devices), its `__call__` gives up the types, and
its calls and attribute lookups, about 1 µs each, would add 0.8 ms to a SmolLM2 decode step.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.models.config import ModelConfig, RopeConfig, RopeKind
from worker.models.ops import Norm, Ops, Rotation

# Published name -> the memory to fill.
Slots = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Build:
    """What every part of a model is made from."""

    config: ModelConfig
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    # Length of the rotary table: the most positions that will be asked for.
    max_context: int

    def empty(self, *shape: int) -> Tensor:
        """An unfilled weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """y = x Wᵀ + b for several projections of one input, side by side in one product."""

    def __init__(
        self,
        build: Build,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool = False,
        tied_to: Tensor | None = None,
    ) -> None:
        self._ops = build.ops
        self._parts = parts
        out_size = sum(parts.values())
        self.weight = build.empty(out_size, in_size) if tied_to is None else tied_to
        self.bias: Tensor | None = build.empty(out_size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight, self.bias)

    def of_norm(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """The product of the norm of x."""
        return self._ops.norm_linear(x, norm.norm, self.weight, self.bias)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the product, in place of `residual`."""
        return self._ops.linear_add(x, self.weight, self.bias, residual)

    def slots(self, prefix: str) -> Slots:
        """`{prefix}{part}.weight` and `.bias`, as slices of the joint weight."""
        slots: Slots = {}
        end = 0
        for name, size in self._parts.items():
            start, end = end, end + size
            slots[f"{prefix}{name}.weight"] = self.weight[start:end]
            if self.bias is not None:
                slots[f"{prefix}{name}.bias"] = self.bias[start:end]
        return slots

    def pack(self) -> None:
        """Brings the filled weight into the device's layout; `slots` is over then."""
        self.weight = self._ops.pack(self.weight)


class RMSNorm:
    """Root mean square norm (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, build: Build) -> None:
        self._ops = build.ops
        self.weight = build.empty(build.config.hidden_size)
        self.norm: Norm = (self.weight, build.config.norm_eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.norm)

    def fold_into(self, linear: Linear) -> None:
        """Before packing: `linear` is the only one that reads this norm."""
        self._ops.fold(self.weight, linear.weight)


class HeadNorm:
    """RMSNorm over each query and key head, one weight for all of a kind (Qwen3)."""

    def __init__(self, build: Build) -> None:
        config = build.config
        self._ops = build.ops
        self._eps = config.norm_eps
        self._num_heads = config.num_heads
        # Queries first, then keys, so that both are normed in one operation.
        self.weight = build.empty(config.num_heads + config.num_kv_heads, config.head_dim)

    def __call__(self, qk: Tensor) -> None:
        """Norms qk [n, num_heads + num_kv_heads, head_dim] in place."""
        self._ops.head_norm(qk, self.weight, self._eps)

    def slots(self, prefix: str) -> Slots:
        """Each slot is the first head's row, which `pack` copies to the others."""
        return {
            f"{prefix}q_norm.weight": self.weight[0],
            f"{prefix}k_norm.weight": self.weight[self._num_heads],
        }

    def pack(self) -> None:
        self.weight[: self._num_heads] = self.weight[0].clone()
        self.weight[self._num_heads :] = self.weight[self._num_heads].clone()


class RotaryEmbedding:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), rotate-half form."""

    def __init__(self, build: Build) -> None:
        self._ops = build.ops
        frequencies = rope_frequencies(build.config.rope, build.config.head_dim)
        positions = torch.arange(build.max_context, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).to(build.device)
        self._table = build.ops.rotary_table(angles, build.dtype)

    def __call__(self, positions: Tensor) -> Rotation:
        return self._ops.rotation(self._table, positions)


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (SwiGLU, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, build: Build) -> None:
        hidden, ffn = build.config.hidden_size, build.config.ffn_size
        self._ops = build.ops
        self.gate_up = Linear(build, hidden, {"gate_proj": ffn, "up_proj": ffn})
        self.down = Linear(build, ffn, {"down_proj": hidden})

    def __call__(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """residual + the MLP of its norm."""
        gated = self._ops.norm_gated_linear(residual, norm.norm, self.gate_up.weight)
        return self.down.added(gated, residual)

    def slots(self, prefix: str) -> Slots:
        return self.gate_up.slots(prefix) | self.down.slots(prefix)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each pair of dimensions: [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.LINEAR:
            return frequencies / rope.factor
        case RopeKind.DIVISORS:
            return frequencies / torch.tensor(rope.divisors)
        case RopeKind.LLAMA3:
            return _llama3_frequencies(rope, frequencies)


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, the rest blended.

    From the Llama 3.1 model card's reference code.
    """
    wavelengths = 2 * math.pi / frequencies
    span = rope.high_freq_factor - rope.low_freq_factor
    blend = (rope.original_max_context / wavelengths - rope.low_freq_factor) / span
    stretched = frequencies / rope.factor
    blended = (1 - blend) * stretched + blend * frequencies
    is_long = wavelengths > rope.original_max_context / rope.low_freq_factor
    is_short = wavelengths < rope.original_max_context / rope.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, frequencies, blended))
