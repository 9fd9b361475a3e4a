"""GGUF files of the other architectures: names, order of rows, and metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from worker.checkpoint.gguf_file import GgufCheckpoint
from worker.checkpoint.load import load_model
from worker.checkpoint.tokenizer_cache import TokenizerCache
from worker.models.config import ModelError, RopeKind
from worker.models.ops import TorchOps

_HIDDEN, _FFN, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 64, 96, 4, 2, 32, 50


def _silent(message: str) -> None:
    """Progress that nobody waits for."""


def _tensors(architecture: str) -> dict[str, NDArray[np.float32]]:
    """One layer's worth of recognisable values under GGUF's names."""
    q, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_VOCAB, _HIDDEN),
        "output_norm.weight": (_HIDDEN,),
        "output.weight": (_VOCAB, _HIDDEN),
        "blk.0.attn_norm.weight": (_HIDDEN,),
        "blk.0.ffn_norm.weight": (_HIDDEN,),
        "blk.0.attn_q.weight": (q, _HIDDEN),
        "blk.0.attn_k.weight": (kv, _HIDDEN),
        "blk.0.attn_v.weight": (kv, _HIDDEN),
        "blk.0.attn_output.weight": (_HIDDEN, q),
        "blk.0.ffn_gate.weight": (_FFN, _HIDDEN),
        "blk.0.ffn_up.weight": (_FFN, _HIDDEN),
        "blk.0.ffn_down.weight": (_HIDDEN, _FFN),
    }
    if architecture == "qwen2":
        shapes |= {"blk.0.attn_q.bias": (q,), "blk.0.attn_k.bias": (kv,)}
        shapes |= {"blk.0.attn_v.bias": (kv,)}
    if architecture == "qwen3":
        shapes |= {"blk.0.attn_q_norm.weight": (_HEAD_DIM,)}
        shapes |= {"blk.0.attn_k_norm.weight": (_HEAD_DIM,)}
    generator = np.random.default_rng(0)
    return {n: generator.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def _write(
    path: Path, architecture: str, tensors: dict[str, NDArray[np.float32]], **metadata: int
) -> None:
    writer: Any = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    # Longer than what the reader passes over: strings, and numbers.
    writer.add_token_list([f"token {i}" for i in range(5000)])
    writer.add_token_types([1] * 5000)
    for key, value in metadata.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _open(path: Path) -> GgufCheckpoint:
    return GgufCheckpoint(path, cache=TokenizerCache(path.parent / "cache"))


def _slots(checkpoint: GgufCheckpoint) -> dict[str, torch.Tensor]:
    cpu = torch.device("cpu")
    return load_model(
        checkpoint, TorchOps(), dtype=torch.float32, device=cpu, progress=_silent
    ).slots()


def _paired(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF's order of a Llama's q and k rows: i and i + head_dim / 2 side by side."""
    split = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_tensors_are_taken_as_they_are(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    tensors = _tensors(architecture)
    _write(path, architecture, tensors)
    slots = _slots(_open(path))
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        f"{layer}input_layernorm.weight": "blk.0.attn_norm.weight",
        f"{layer}post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        f"{layer}self_attn.q_proj.weight": "blk.0.attn_q.weight",
        f"{layer}self_attn.k_proj.weight": "blk.0.attn_k.weight",
        f"{layer}self_attn.o_proj.weight": "blk.0.attn_output.weight",
        f"{layer}mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        f"{layer}mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    if architecture == "qwen2":
        expected[f"{layer}self_attn.k_proj.bias"] = "blk.0.attn_k.bias"
    else:
        expected[f"{layer}self_attn.k_norm.weight"] = "blk.0.attn_k_norm.weight"
    for name, source in expected.items():
        assert np.array_equal(
            slots[name].reshape(-1)[: tensors[source].size].numpy(), tensors[source].reshape(-1)
        ), name


def test_a_llama_s_paired_rows_are_put_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = _tensors("llama")
    stored = tensors | {
        "blk.0.attn_q.weight": _paired(tensors["blk.0.attn_q.weight"], _HEADS),
        "blk.0.attn_k.weight": _paired(tensors["blk.0.attn_k.weight"], _KV_HEADS),
    }
    _write(path, "llama", stored)
    slots = _slots(_open(path))
    for kind in ("q", "k", "v"):
        actual = slots[f"model.layers.0.self_attn.{kind}_proj.weight"].numpy()
        assert np.array_equal(actual, tensors[f"blk.0.attn_{kind}.weight"]), kind


def test_metadata_gives_shape_eos_tokens_and_rope_divisors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    divisors = np.linspace(1, 8, _HEAD_DIM // 2).astype(np.float32)
    tensors = _tensors("llama") | {"rope_freqs.weight": divisors}
    del tensors["output.weight"]
    _write(path, "llama", tensors, eos_token_id=7, eot_token_id=9, bos_token_id=1)
    checkpoint = _open(path)
    config = checkpoint.config
    assert (config.head_dim, config.num_kv_heads, config.vocab_size) == (32, 2, 50)
    assert (config.max_context, config.tied_embeddings) == (256, True)
    assert config.rope.kind is RopeKind.DIVISORS
    assert config.rope.divisors == tuple(divisors.tolist())
    assert checkpoint.eos_token_ids == (7, 9)
    assert checkpoint.name == "tiny"
    assert _slots(checkpoint)["model.norm.weight"].shape == (_HIDDEN,)


def test_an_architecture_that_is_not_built_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, "gemma", _tensors("llama"))
    with pytest.raises(ModelError, match="GGUF architecture 'gemma' is not supported"):
        _open(path)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    _write(whole, "llama", _tensors("llama"))
    content = whole.read_bytes()
    for length in range(8, len(content) - 1, len(content) // 40):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cannot read .*cut\.gguf"):
            _slots(_open(cut))
