"""Small tokenizers of the kinds that SmolLM2's is not."""

import json
from typing import Any

WORDS = ["▁the", "▁", "▁▁", "a", "b", "é", "世", "界", "😀", "▁wor", "ld", "\ufffd"]
BYTE_FALLBACK_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def metaspace_files(decoder: dict[str, Any] = BYTE_FALLBACK_DECODER) -> dict[str, bytes]:
    """Ids: 0 to 2 `<unk>` `<s>` `</s>`, then the 256 bytes, then WORDS."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, token in enumerate(special)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [],
        },
    }
    return {
        "tokenizer.json": json.dumps(document).encode(),
        "tokenizer_config.json": b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}}',
    }
