"""Tokenizer files as one bundle, normalised so that a gateway need not guess.

A bundle holds tokenizer.json, tokenizer_config.json and, where the model has one,
chat_template.jinja. Its tokenizer_config.json always says bos_token and eos_token
(a string or null) and add_bos_token: whether tokenizer.json, asked to add special
tokens, puts BOS in front.
"""

import hashlib
import json
from pathlib import Path
from typing import cast

from worker.messages import TokenizerBundle
from worker.models.config import Json, ModelError, read_json

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


def make_bundle(files: dict[str, bytes]) -> TokenizerBundle:
    """A bundle of final files, with the hash of all their names and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return TokenizerBundle(files=files, sha256=digest.hexdigest())


def bundle_of_folder(folder: Path) -> TokenizerBundle:
    """The bundle of a folder in the hub's layout; empty where it has no tokenizer.json."""
    path = folder / TOKENIZER
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise ModelError(
                f"{folder} has a SentencePiece tokenizer.model alone; save it once with "
                "transformers' AutoTokenizer to get a tokenizer.json"
            )
        return make_bundle({})
    config_path, template_path = folder / CONFIG, folder / TEMPLATE
    config = read_json(config_path.read_bytes(), str(config_path)) if config_path.is_file() else {}
    template = template_path.read_text("utf-8") if template_path.is_file() else None
    return normalised_bundle(path.read_bytes(), config, template=template)


def normalised_bundle(
    tokenizer: bytes, config: Json, *, template: str | None = None, must_add_bos: bool = False
) -> TokenizerBundle:
    """The bundle of these files, with what the config leaves open filled in.

    With `must_add_bos`, a tokenizer that does not put BOS in front is made to.
    """
    parsed = read_json(tokenizer, TOKENIZER)
    plain = dict(config)
    bos, eos = (_token_text(plain.get(name)) for name in ("bos_token", "eos_token"))
    if must_add_bos and bos is not None and not _adds_bos(parsed, bos):
        parsed["post_processor"] = _bos_processor(parsed, bos)
        tokenizer = json.dumps(parsed, ensure_ascii=False).encode()
    plain |= {"bos_token": bos, "eos_token": eos, "add_bos_token": _adds_bos(parsed, bos)}
    files = {TOKENIZER: tokenizer, CONFIG: json.dumps(plain, indent=2, sort_keys=True).encode()}
    if template is not None:
        files[TEMPLATE] = template.encode()
    return make_bundle(files)


def eos_of_bundle(bundle: TokenizerBundle) -> list[int]:
    """The id of the tokenizer's eos token, if it names one."""
    if CONFIG not in bundle.files:
        return []
    text = read_json(bundle.files[CONFIG], CONFIG)["eos_token"]
    if text is None:
        return []
    parsed = read_json(bundle.files[TOKENIZER], TOKENIZER)
    token_id = _token_ids(parsed).get(str(text))
    return [] if token_id is None else [token_id]


def _token_ids(parsed: Json) -> dict[str, int]:
    ids: dict[str, int] = {}
    model = parsed.get("model")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        ids.update(model["vocab"])
    for token in cast(list[dict[str, object]], parsed.get("added_tokens") or []):
        ids[str(token["content"])] = cast(int, token["id"])
    return ids


def _token_text(value: object) -> str | None:
    """A special token as text: older configs hold an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _adds_bos(parsed: Json, bos: str | None) -> bool:
    """Whether the tokenizer's post-processor puts BOS in front of a text."""
    if bos is None:
        return False
    return any(_first_special_token(part) == bos for part in _post_processors(parsed))


def _post_processors(parsed: Json) -> list[dict[str, object]]:
    post = parsed.get("post_processor")
    if not isinstance(post, dict):
        return []
    inner = post.get("processors")
    return inner if isinstance(inner, list) else [post]


def _first_special_token(processor: Json) -> object:
    single = processor.get("single")
    first = single[0] if isinstance(single, list) and single else {}
    token = first.get("SpecialToken")
    return token.get("id") if isinstance(token, dict) else None


def _bos_processor(parsed: Json, bos: str) -> dict[str, object]:
    """The tokenizer's post-processors, and after them one that puts BOS in front."""
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            special,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [_token_ids(parsed)[bos]], "tokens": [bos]}},
    }
    return {"type": "Sequence", "processors": [*_post_processors(parsed), template]}
