"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on q, k and v alone."""

from torch import Tensor

from worker.models.attention import Attend
from worker.models.decoder import Decoder
from worker.models.layers import Build, Linear, RMSNorm, Slots
from worker.models.ops import Rotation


class Qwen2Attention:
    """Grouped-query attention with biased queries, keys and values."""

    def __init__(self, build: Build, index: int) -> None:
        config = build.config
        self._ops = build.ops
        self._index = index
        self._head_dim = config.head_dim
        # Heads of the joint projection: queries, keys, values; the first two rotate.
        self._split = (config.num_heads, 2 * config.num_kv_heads)
        self._num_rotated = config.num_heads + config.num_kv_heads
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(build, config.hidden_size, parts, bias=True)
        self.out = Linear(build, q_size, {"o_proj": config.hidden_size})

    def __call__(
        self, residual: Tensor, norm: RMSNorm, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """residual + the attention of its norm."""
        qkv = self.qkv.of_norm(residual, norm).view(len(residual), -1, self._head_dim)
        q, kv = qkv.split_with_sizes(self._split, dim=1)
        qk = qkv[:, : self._num_rotated]
        self._ops.rotate(qk, rotation)
        return self.out.added(attend(self._index, q, kv), residual)

    def slots(self, prefix: str) -> Slots:
        return self.qkv.slots(prefix) | self.out.slots(prefix)

    def pack(self) -> None:
        self.qkv.pack()
        self.out.pack()


def qwen2_for_causal_lm(build: Build) -> Decoder:
    """Qwen2ForCausalLM."""
    return Decoder(build, Qwen2Attention)
