"""Checkpoints are found, read and refused as a user would expect."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.models.tiny import Shape, write_checkpoint
from worker.checkpoint.folder import FolderCheckpoint
from worker.checkpoint.load import load_model
from worker.checkpoint.open import default_cache_dir, open_checkpoint
from worker.checkpoint.source import Checkpoint
from worker.models.config import ModelError
from worker.models.ops import TorchOps


def _silent(message: str) -> None:
    """Progress that nobody waits for."""


def _open(source: object, folder: Path, *, dummy: bool = False) -> Checkpoint:
    return open_checkpoint(
        str(source), cache_dir=folder / "cache", progress=_silent, dummy_weights=dummy
    )


def _slots(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load_model(
        checkpoint, TorchOps(), dtype=dtype, device=torch.device("cpu"), progress=_silent
    )
    return model.slots()


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_s_values_are_those_that_transformers_has(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    reference = write_checkpoint(tmp_path, Shape(architecture, tied=tied))
    slots = _slots(_open(tmp_path, tmp_path))
    expected = reference.state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert slots.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(slots[name], tensor), name


def test_weights_split_over_several_files_are_all_read(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path / "one", Shape("Llama"))
    reference.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    slots = _slots(_open(tmp_path / "many", tmp_path))
    for name, tensor in reference.state_dict().items():
        assert torch.equal(slots[name], tensor), name


def test_weights_are_converted_to_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, Shape("Llama"))
    slots = _slots(_open(tmp_path, tmp_path), torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(slots[name], reference.state_dict()[name].bfloat16())


def test_progress_is_told_until_the_last_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    told: list[str] = []
    load_model(
        _open(tmp_path, tmp_path),
        TorchOps(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=told.append,
    )
    assert told[-1] == "loading weights: 30 of 30 tensors"


def test_eos_ids_are_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    _change_config(tmp_path, eos_token_id=[2, 9])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 5, "content": "<end>"}], "model": {"vocab": {}}})
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert _open(tmp_path, tmp_path).eos_token_ids == (2, 5, 7, 9)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 tensors, such as model\.layers\.1\.mlp\.up"):
        _slots(_open(tmp_path, tmp_path))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    _change_config(tmp_path, intermediate_size=161)
    with pytest.raises(ModelError, match=r"mlp.*\[160, 96\].*\[161, 96\]|mlp.*\[96, 160\]"):
        _slots(_open(tmp_path, tmp_path))


def test_a_tensor_that_the_architecture_has_no_place_for_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Qwen2"))
    _change_config(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"_proj\.bias .* no place"):
        _slots(_open(tmp_path, tmp_path))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        _slots(_open(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors are not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    _change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        _open(tmp_path, tmp_path)


def test_a_sliding_window_in_force_bounds_the_context(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Mistral"))
    _change_config(tmp_path, sliding_window=100)
    assert _open(tmp_path, tmp_path).config.max_context == 100
    write_checkpoint(tmp_path, Shape("Qwen2"))
    _change_config(tmp_path, sliding_window=100, use_sliding_window=False)
    assert _open(tmp_path, tmp_path).config.max_context == 512


def test_a_context_longer_than_the_model_s_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape("Llama"))
    with pytest.raises(ModelError, match="max_context 513 exceeds the 512 tokens"):
        load_model(
            _open(tmp_path, tmp_path),
            TorchOps(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            progress=_silent,
            max_context=513,
        )


@pytest.mark.parametrize("source", ["/nowhere/at/all", "no-such-model", "./a/b/c"])
def test_a_source_of_no_known_kind_is_refused_with_the_known_kinds(
    tmp_path: Path, source: str
) -> None:
    with pytest.raises(ModelError, match=r"not a folder, a \.gguf file, a hub id"):
        _open(source, tmp_path)


def test_a_folder_without_config_says_which_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file"):
        _open(tmp_path, tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*model\.gguf as GGUF"):
        _open(path, tmp_path)


def test_dummy_weights_need_a_config_alone_and_are_the_same_every_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "full", Shape("Qwen3"))
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tmp_path / "full" / "config.json", folder)
    once = _slots(_open(folder, tmp_path, dummy=True))
    again = _slots(_open(folder / "config.json", tmp_path, dummy=True))
    for name, tensor in once.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.isfinite(tensor).all()
    projections = [t for name, t in once.items() if name.endswith("q_proj.weight")]
    assert not torch.equal(projections[0], projections[1])


def test_presets_have_the_published_number_of_parameters(tmp_path: Path) -> None:
    small = _open("qwen3-0.6b", tmp_path, dummy=True).config
    large = _open("qwen3-8b", tmp_path, dummy=True).config
    assert round(small.num_parameters / 1e9, 2) == 0.60
    assert round(large.num_parameters / 1e9, 1) == 8.2
    assert (small.architecture, small.head_dim, small.max_context) == (
        "Qwen3ForCausalLM",
        128,
        40960,
    )


def test_dummy_weights_for_nothing_known_list_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"qwen3-0\.6b"):
        _open("qwen3-70b", tmp_path, dummy=True)


def test_the_cache_is_in_the_xdg_directory() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/tandem")
    assert default_cache_dir({"HOME": "/h"}) == Path("/h/.cache/tandem")


def test_a_checkpoint_is_called_by_its_folder_unless_it_has_a_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "my-model", Shape("Llama"))
    assert _open(tmp_path / "my-model", tmp_path).name == "my-model"
    assert FolderCheckpoint(tmp_path / "my-model", name="owner/model").name == "owner/model"
