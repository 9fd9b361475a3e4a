"""Tiny random checkpoints, written by transformers in the layout of the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from worker.checkpoint.load import load_model
from worker.checkpoint.open import open_checkpoint
from worker.models.decoder import Decoder
from worker.models.ops import TorchOps

VOCAB_SIZE = 211


@dataclass(frozen=True, slots=True)
class Shape:
    """One tiny model: an architecture and what is special about it."""

    architecture: str
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    tied: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        names = "-".join(name for name, _ in self.extra)
        heads = f"{self.num_heads}q{self.num_kv_heads}kv{self.head_dim}"
        return "-".join(filter(None, (self.architecture, heads, tied, names)))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

SHAPES = (
    Shape("Llama", num_kv_heads=4),
    Shape("Llama", num_heads=8, num_kv_heads=1, tied=True),
    Shape("Llama", extra=(("attention_bias", True),)),
    Shape("Llama", extra=(("rope_parameters", LLAMA3_ROPE),)),
    Shape("Llama", extra=(("rope_parameters", LINEAR_ROPE),)),
    Shape("Mistral", num_heads=8, num_kv_heads=2, head_dim=128),
    Shape("Qwen2", num_heads=4, num_kv_heads=1, tied=True),
    Shape("Qwen2", num_heads=2, num_kv_heads=2, head_dim=128),
    Shape("Qwen3", num_heads=4, num_kv_heads=2, head_dim=128, tied=True),
    Shape("Qwen3", num_heads=8, num_kv_heads=1),
)


def write_checkpoint(folder: Path, shape: Shape, *, seed: int = 0) -> PreTrainedModel:
    """Saves a random model of the shape; gives transformers' own, in float32."""
    torch.manual_seed(seed)
    config_class = getattr(transformers, f"{shape.architecture}Config")
    config: PretrainedConfig = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        **dict(shape.extra),
    )
    model_class = getattr(transformers, f"{shape.architecture}ForCausalLM")
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than usual and nowhere constant, so that every weight shows in the logits.
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def load_tiny(folder: Path, *, prepack: bool, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = open_checkpoint(str(folder), cache_dir=folder / "cache", progress=print)
    return load_model(
        checkpoint,
        TorchOps(prepack=prepack),
        dtype=dtype,
        device=torch.device("cpu"),
        progress=print,
    )
