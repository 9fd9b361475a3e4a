"""A bundle says what a gateway must know, whatever form the checkpoint has it in."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from worker.checkpoint.tokenizer import bundle_of_folder, eos_of_bundle, normalised_bundle
from worker.models.config import ModelError

_VOCABULARY = {"<s>": 0, "</s>": 1, "one": 2, "two": 3}


def _tokenizer(*, adds_bos: bool) -> bytes:
    tokenizer = tokenizers.Tokenizer(WordLevel(_VOCABULARY, unk_token="one"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer.to_str().encode()


def _config(files: dict[str, bytes]) -> dict[str, object]:
    config: dict[str, object] = json.loads(files["tokenizer_config.json"])
    return config


@pytest.mark.parametrize("adds_bos", [True, False])
def test_add_bos_token_says_what_the_tokenizer_does(adds_bos: bool) -> None:
    bundle = normalised_bundle(
        _tokenizer(adds_bos=adds_bos), {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    )
    config = _config(bundle.files)
    assert config["add_bos_token"] is adds_bos
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert eos_of_bundle(bundle) == [1]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_tokenizer_that_must_add_bos_does_so_once(adds_bos: bool) -> None:
    bundle = normalised_bundle(
        _tokenizer(adds_bos=adds_bos), {"bos_token": "<s>"}, must_add_bos=True
    )
    tokenizer = tokenizers.Tokenizer.from_buffer(bundle.files["tokenizer.json"])
    assert tokenizer.encode("one two").ids == [0, 2, 3]
    assert tokenizer.encode("one two", add_special_tokens=False).ids == [2, 3]
    assert _config(bundle.files)["add_bos_token"] is True


def test_tokens_that_a_model_does_not_have_are_null() -> None:
    bundle = normalised_bundle(_tokenizer(adds_bos=False), {})
    assert _config(bundle.files) == {"bos_token": None, "eos_token": None, "add_bos_token": False}
    assert eos_of_bundle(bundle) == []


def test_the_hash_changes_with_every_byte(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(_tokenizer(adds_bos=False))
    plain = bundle_of_folder(tmp_path)
    assert bundle_of_folder(tmp_path) == plain
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with_template = bundle_of_folder(tmp_path)
    assert with_template.files["chat_template.jinja"] == b"{{ messages }}"
    assert with_template.sha256 != plain.sha256


def test_a_folder_without_a_tokenizer_has_an_empty_bundle(tmp_path: Path) -> None:
    assert bundle_of_folder(tmp_path).files == {}


def test_a_sentencepiece_tokenizer_alone_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(ModelError, match="save it once with transformers' AutoTokenizer"):
        bundle_of_folder(tmp_path)
