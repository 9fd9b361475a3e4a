"""Shapes of published models, for runs with dummy weights."""

from worker.models.config import Json


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> Json:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
    }


PRESETS: dict[str, Json] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
}
