"""The frame that the decoders share: embedding, layers, final norm, LM head.

What tells the architectures apart is their attention, which each has in its own file.
"""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from worker.models.attention import Attend
from worker.models.layers import Build, GatedMLP, Linear, RMSNorm, RotaryEmbedding, Slots
from worker.models.ops import Rotation


class Attention(Protocol):
    """An architecture's attention: its projections around the engine's `attend`."""

    qkv: Linear

    def __call__(
        self, residual: Tensor, norm: RMSNorm, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """residual + the attention of its norm."""
        ...

    def slots(self, prefix: str) -> Slots: ...

    def pack(self) -> None: ...


# Builds the attention of one layer, whose index it will give to `attend`.
MakeAttention = Callable[[Build, int], Attention]


class DecoderLayer:
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, build: Build, attention: Attention) -> None:
        self.input_norm = RMSNorm(build)
        self.attention = attention
        self.mlp_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)

    def __call__(self, residual: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        residual = self.attention(residual, self.input_norm, rotation, attend)
        return self.mlp(residual, self.mlp_norm)

    def slots(self, prefix: str) -> Slots:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.slots(f"{prefix}self_attn."),
            **self.mlp.slots(f"{prefix}mlp."),
        }

    def pack(self) -> None:
        self.input_norm.fold_into(self.attention.qkv)
        self.mlp_norm.fold_into(self.mlp.gate_up)
        self.attention.pack()
        self.mlp.pack()


class Decoder:
    """A causal language model over the tokens of one step, whosever they are.

    Fill `slots()` with the checkpoint's tensors, call `pack()`, then run it under
    `torch.inference_mode()`.
    """

    def __init__(self, build: Build, make_attention: MakeAttention) -> None:
        config = build.config
        self.config = config
        self.dtype = build.dtype
        self.max_context = build.max_context
        self.embedding = build.empty(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(build)
        self.layers = [
            DecoderLayer(build, make_attention(build, index)) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(build)
        self.head = Linear(
            build,
            config.hidden_size,
            {"lm_head": config.vocab_size},
            tied_to=self.embedding if config.tied_embeddings else None,
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of token_ids and positions [num_tokens]."""
        residual = F.embedding(token_ids, self.embedding)
        rotation = self.rotary(positions)
        for layer in self.layers:
            residual = layer(residual, rotation, attend)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab_size] for hidden states [n, hidden_size] that the call gave."""
        return self.head(self.norm(hidden))

    def slots(self) -> Slots:
        """Every weight of the checkpoint by its published name, as memory to fill."""
        slots = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tied_embeddings:
            slots |= self.head.slots("")
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}.")
        return slots

    def pack(self) -> None:
        """Brings the filled weights into the device's layout, one by one."""
        for layer in self.layers:
            layer.pack()
        self.head.pack()
