"""The shape of a checkpoint, and which checkpoints can be served."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from shared.errors import Code, ServingError

# What JSON can hold; a config is untrusted until `from_hf` has read it.
Json = Mapping[str, object]

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class ModelError(ServingError):
    """A checkpoint that cannot be served: what is wrong with it and what would help."""

    code = Code.FAILED_PRECONDITION


class RopeKind(StrEnum):
    """How the rotary frequencies are stretched for long contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    # One divisor for each frequency, as GGUF files store them.
    DIVISORS = "divisors"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) and its scaling."""

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides a model's shape and arithmetic.

    `max_context` is the most positions the model is good for. A sliding window is not
    built: up to the window full attention is the same thing, so it bounds `max_context`.
    """

    architecture: str
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    # Llama's `attention_bias`: on the output projection too. Qwen2 has its own.
    attention_bias: bool = False
    # As torch names it: the type in which the weights were published.
    dtype: str = "float32"

    @classmethod
    def from_hf(cls, raw: Json) -> "ModelConfig":
        """Reads a config.json, as transformers 4 or 5 writes it. Raises ModelError."""
        fields = _Fields(raw)
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            ffn_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", hidden_size // num_heads),
            vocab_size=fields.integer("vocab_size"),
            max_context=_max_context(raw, fields),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(raw, fields),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones counted once."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (qkv + self.num_heads * self.head_dim + 3 * self.ffn_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings


class _Fields:
    """Typed access to a config, with errors that name the field."""

    def __init__(self, raw: Json) -> None:
        self._raw = raw

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float):
            raise ModelError(f"config.json: {name} must be a number, not {value!r}")
        return float(value)


def read_json(text: str | bytes, source: str) -> dict[str, object]:
    """Parses a JSON object. Raises ModelError that names the source."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{source} must hold a JSON object")
    return cast(dict[str, object], value)


def _architecture(raw: Json) -> str:
    known = set(_ARCHITECTURE_OF_TYPE.values())
    named = raw.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not names:
        names = [_ARCHITECTURE_OF_TYPE.get(str(raw.get("model_type")), "")]
    for name in names:
        if name in known:
            return name
    shown = ", ".join(filter(None, names)) or raw.get("model_type") or "none named"
    raise ModelError(f"architecture {shown} is not supported; supported: {sorted(known)}")


def _refuse_unsupported(raw: Json) -> None:
    """Arithmetic that the model classes do not have must not be left out silently."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported")
    if raw.get("quantization_config"):
        raise ModelError("quantized safetensors are not supported; use full weights or a GGUF")


def _max_context(raw: Json, fields: _Fields) -> int:
    max_context = fields.integer("max_position_embeddings", 2048)
    window = raw.get("sliding_window")
    # Qwen configs name a window that is only in force with use_sliding_window.
    in_force = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    if isinstance(window, int) and window > 0 and in_force:
        return min(max_context, window)
    return max_context


def _rope(raw: Json, fields: _Fields) -> RopeConfig:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope scaling must be an object, not {scaling!r}")
    inner = _Fields(scaling)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    name = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if name not in {"default", "linear", "llama3"}:
        raise ModelError(f"rope type {name!r} is not supported; supported: default, linear, llama3")
    partial = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor {partial} is not supported, only 1")
    kind = RopeKind(name)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=inner.number("factor", 1.0),
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_max_context=inner.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings", 2048)
        ),
    )
