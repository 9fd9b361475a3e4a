"""A GGUF file: its weights dequantised, its names and layout turned into the hub's."""

import dataclasses
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import ReaderTensor, dequantize
from torch import Tensor

from worker.checkpoint.gguf_reader import QuickReader
from worker.checkpoint.source import Progress, fill_from
from worker.checkpoint.tokenizer_cache import TokenizerCache
from worker.messages import TokenizerBundle
from worker.models.config import ModelConfig, ModelError, RopeConfig, RopeKind
from worker.models.layers import Slots

# GGUF calls Mistral "llama" too; the arithmetic is the same.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufCheckpoint:
    """One GGUF file; its metadata stands for config and tokenizer."""

    def __init__(self, path: Path, *, cache: TokenizerCache, name: str | None = None) -> None:
        """Reads the metadata. Raises ModelError."""
        self._path = path
        self._cache = cache
        self._reader = _open(path)
        self._architecture = str(self._value("general.architecture"))
        self._name = name or str(self._value("general.name", path.stem))
        self._config = self._read_config()

    @property
    def name(self) -> str:
        return self._name

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        values = (self._value(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
        return tuple(sorted({value for value in values if isinstance(value, int)}))

    def tokenizer(self, progress: Progress) -> TokenizerBundle:
        """Converted by transformers once; kept in the cache, by the hash of the metadata."""
        with self._path.open("rb") as file:
            metadata = file.read(self._reader.data_offset)
        key = hashlib.sha256(metadata).hexdigest()
        must_add_bos = self._value("tokenizer.ggml.add_bos_token") is True
        return self._cache.get_gguf(self._path, key, must_add_bos=must_add_bos, progress=progress)

    def fill(self, slots: Slots, progress: Progress) -> None:
        fill_from(self._tensors(), slots, progress, tied=self._config.tied_embeddings)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for tensor in self._reader.tensors:
            # dequantize gives a view of the read-only file for tensors that need nothing.
            values = np.array(dequantize(tensor.data, tensor.tensor_type), copy=None)
            weight = torch.from_numpy(np.require(values, requirements="W"))
            yield _published_name(tensor.name), self._unpermuted(tensor.name, weight)

    def _unpermuted(self, name: str, weight: Tensor) -> Tensor:
        """Undoes the order of q and k rows, which GGUF pairs for its rotary embedding.

        Within each head it stores row i and row i + head_dim / 2 side by side.
        """
        if self._architecture != "llama" or ".attn_" not in name:
            return weight
        kind = name.split(".")[2]
        if kind not in {"attn_q", "attn_k"}:
            return weight
        heads = self._config.num_heads if kind == "attn_q" else self._config.num_kv_heads
        paired = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return paired.transpose(1, 2).reshape(weight.shape)

    def _read_config(self) -> ModelConfig:
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._architecture not in _ARCHITECTURES:
            supported = sorted(_ARCHITECTURES)
            raise ModelError(
                f"{self._path}: GGUF architecture {self._architecture!r} is not supported; "
                f"supported: {supported}"
            )
        heads = self._number("attention.head_count")
        raw = {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "hidden_size": self._number("embedding_length"),
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": self._number("attention.key_length"),
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": self._number("attention.sliding_window"),
            "use_sliding_window": True,
            "dtype": "float32",
        }
        config = ModelConfig.from_hf(raw)
        return _with_divisors(config, tensors.get("rope_freqs.weight"))

    def _rope_scaling(self) -> dict[str, object] | None:
        kind = self._number("rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self._number("rope.scaling.factor", 1.0)}

    def _number(self, key: str, default: object = None) -> object:
        return self._value(f"{self._architecture}.{key}", default)

    def _value(self, key: str, default: object = None) -> object:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()


def _open(path: Path) -> QuickReader:
    try:
        return QuickReader(path)
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        # The reader runs off the end of a file that was cut short.
        raise ModelError(f"cannot read {path} as GGUF: {error}") from error


def _published_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{suffix}"
    return f"{_NAMES.get(stem, stem)}.{suffix}"


def _with_divisors(config: ModelConfig, divisors: ReaderTensor | None) -> ModelConfig:
    """Llama 3.1's stretched frequencies come as a tensor of divisors."""
    if divisors is None:
        return config
    values = tuple(float(value) for value in divisors.data)
    rope = RopeConfig(theta=config.rope.theta, kind=RopeKind.DIVISORS, divisors=values)
    return dataclasses.replace(config, rope=rope)
