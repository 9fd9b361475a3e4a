"""Model folders and running pairs for the end-to-end tests."""

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from tests.integration.pair import Client, Pair, running_pair
from worker.checkpoint.open import default_cache_dir, open_checkpoint

BUILT_IN = "smollm2-135m-instruct"
ECHO = ("--engine", "echo", "--max-context", "4096", "--echo-step-ms", "1")

MakeFolder = Callable[..., Path]


class StartPair(Protocol):
    """Starts a pair for the length of a `with` block."""

    def __call__(
        self,
        worker_args: Sequence[str],
        gateway_args: Sequence[str] = (),
        *,
        num_workers: int = 1,
        token: str = "",
    ) -> AbstractContextManager[Pair]: ...


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, bytes]:
    """SmolLM2's own tokenizer, as a worker hands it to gateways."""
    cache_dir = default_cache_dir(os.environ)
    checkpoint = open_checkpoint(BUILT_IN, cache_dir=cache_dir, progress=lambda _: None)
    return checkpoint.tokenizer(lambda _: None).files


@pytest.fixture(scope="session")
def make_model_folder(
    tokenizer_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> MakeFolder:
    """Builds a model folder: SmolLM2's tokenizer, a two-layer config, and what a test alters."""

    def make(
        *,
        chat_template: str | None = None,
        eos_token_id: list[int] | None = None,
        tokenizer_json: bytes | None = None,
        tokenizer_config: dict[str, object] | None = None,
    ) -> Path:
        folder = tmp_path_factory.mktemp("model")
        files = dict(tokenizer_files)
        if chat_template is not None:
            files["chat_template.jinja"] = chat_template.encode()
        if tokenizer_json is not None:
            files["tokenizer.json"] = tokenizer_json
        if tokenizer_config is not None:
            merged = {**json.loads(files["tokenizer_config.json"]), **tokenizer_config}
            merged.pop("chat_template", None)
            files["tokenizer_config.json"] = json.dumps(merged).encode()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
        generation = {"eos_token_id": eos_token_id or [2]}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def start_pair(
    tokenizer_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> StartPair:
    """Workers that name no model get SmolLM2's bare tokenizer, which starts in a second."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files.items():
        (tokenizer / name).write_bytes(content)

    def start(
        worker_args: Sequence[str],
        gateway_args: Sequence[str] = (),
        *,
        num_workers: int = 1,
        token: str = "",
    ) -> AbstractContextManager[Pair]:
        model = () if "--model" in worker_args else ("--model", str(tokenizer))
        return running_pair(
            tmp_path_factory.mktemp("pair"),
            (*worker_args, *model),
            gateway_args,
            num_workers=num_workers,
            token=token,
        )

    return start


@pytest.fixture(scope="session")
def echo_pair(start_pair: StartPair) -> Iterator[Pair]:
    """A fast echo worker behind a gateway."""
    with start_pair(ECHO) as pair:
        yield pair


@pytest.fixture(scope="session")
def slow_echo_pair(start_pair: StartPair) -> Iterator[Pair]:
    """An echo worker that takes 20 ms a step, with room for 4 running and 4 waiting."""
    args = (*ECHO[:-1], "20", "--max-running", "4", "--max-waiting", "4")
    with start_pair(args) as pair:
        yield pair


@pytest.fixture
async def client(echo_pair: Pair) -> AsyncIterator[Client]:
    async with Client(echo_pair.address) as client:
        yield client
        await client.assert_clean()


@pytest.fixture
async def slow_client(slow_echo_pair: Pair) -> AsyncIterator[Client]:
    async with Client(slow_echo_pair.address) as client:
        yield client
        await client.assert_clean()
