"""What a layer asks of the engine."""

from typing import Protocol

from torch import Tensor


class Attend(Protocol):
    """Causal attention of a step's tokens over their own requests' KV.

    The engine knows which token belongs to which request and where KV lies; it stores
    the step's keys and values before it attends, so that a token sees itself.
    """

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """q [n, num_heads, head_dim]; kv [n, 2 * num_kv_heads, head_dim], keys then values.

        Both are rotated and may be strided views: keys and values come as one tensor
        because the joint projection made them one and the KV pool may store them so.
        Gives [n, num_heads * head_dim]. Scores are scaled by head_dim ** -0.5.
        """
        ...
