"""The built-in SmolLM2: values, tokenizer, cache, and greedy parity with transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

from tests.worker.engine.plans import PlanBuilder
from worker.checkpoint.load import load_model
from worker.checkpoint.open import BUILT_IN, built_in_path, open_checkpoint
from worker.checkpoint.source import Checkpoint
from worker.engine.cpu import CpuEngine, CpuEngineConfig
from worker.models.ops import TorchOps

_PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n: int) -> int:\n    ",
    "Die Würde des Menschen ist 🎈",
    "1, 1, 2, 3, 5, 8,",
)
_NUM_TOKENS = 16


def _silent(message: str) -> None:
    """Progress that nobody waits for."""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def checkpoint(cache_dir: Path) -> Checkpoint:
    return open_checkpoint(BUILT_IN, cache_dir=cache_dir, progress=_silent)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    path = built_in_path()
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype="float32"
    )
    return model


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[CpuEngine]:
    config = CpuEngineConfig(num_pages=64, max_rows=4, max_context=128, threads=1)
    model = load_model(
        checkpoint,
        TorchOps(prepack=True),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=_silent,
    )
    engine = CpuEngine(lambda: model, config)
    yield engine
    engine.close()


def test_dequantised_values_are_those_that_transformers_has(
    checkpoint: Checkpoint, reference: PreTrainedModel
) -> None:
    model = load_model(
        checkpoint,
        TorchOps(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=_silent,
    )
    slots = model.slots()
    expected = reference.state_dict()
    assert set(slots) == set(expected) - {"lm_head.weight"}
    for name, slot in slots.items():
        assert torch.equal(slot, expected[name]), name


def test_the_shape_and_the_end_of_text_are_as_published(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.max_context, config.tied_embeddings) == (49152, 8192, True)
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.name == BUILT_IN


def test_greedy_tokens_are_those_of_transformers_generate(
    checkpoint: Checkpoint, reference: PreTrainedModel, engine: CpuEngine
) -> None:
    files = checkpoint.tokenizer(_silent).files
    tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    prompts = {row: tokenizer.encode(text).ids for row, text in enumerate(_PROMPTS)}
    builder = PlanBuilder(page_size=16, num_pages=64, max_rows=4)
    plans = [builder.plan(prefill=prompts)]
    plans += [builder.plan(decode=list(prompts)) for _ in range(_NUM_TOKENS - 1)]
    ours = np.stack([engine.launch(plan).result().token_ids for plan in plans], axis=1)
    for row, prompt in prompts.items():
        ids = torch.tensor([prompt])
        out = reference.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        theirs = out[0, len(prompt) :].tolist()
        assert ours[row, : len(theirs)].tolist() == theirs, _PROMPTS[row]


def test_the_tokenizer_is_cached_and_says_what_a_gateway_must_know(
    checkpoint: Checkpoint, cache_dir: Path
) -> None:
    first = checkpoint.tokenizer(_silent)
    told: list[str] = []
    again = open_checkpoint(BUILT_IN, cache_dir=cache_dir, progress=_silent).tokenizer(told.append)
    assert again == first
    assert told == []
    assert set(first.files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert b'"add_bos_token": false' in first.files["tokenizer_config.json"]
    assert b'"eos_token": "<|im_end|>"' in first.files["tokenizer_config.json"]
    assert b"<|im_start|>" in first.files["chat_template.jinja"]


def test_a_damaged_cache_entry_is_made_anew(checkpoint: Checkpoint, cache_dir: Path) -> None:
    wanted = checkpoint.tokenizer(_silent)
    (entry,) = (cache_dir / "tokenizers").iterdir()
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 0xFF
    entry.write_bytes(content)
    told: list[str] = []
    assert checkpoint.tokenizer(told.append) == wanted
    assert told == ["converting the tokenizer (once; it is cached)"]
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


def test_a_cache_that_cannot_be_written_is_told_and_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "tokenizers").write_text("a file where the folder should be")
    told: list[str] = []
    checkpoint = open_checkpoint(BUILT_IN, cache_dir=tmp_path, progress=told.append)
    assert "tokenizer.json" in checkpoint.tokenizer(told.append).files
    assert told[-1].startswith("cannot cache the converted tokenizer")
