"""How many tokens a text has at least, told from its bytes alone.

Encoding 20 MiB takes seconds, and a single word of that size takes gigabytes as well; a
prompt that cannot fit in any case need not be encoded to be refused.
"""

from typing import Any

from gateway.vocabulary import byte_alphabet

# Canonical composition packs at most 9 bytes (three Hangul letters) into 3.
_MAX_NFC_SHRINK = 3


class LengthProof:
    """Holds for byte-level BPE, where every byte goes into some token; elsewhere proves nothing."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._lost = b""
        self._max_token_bytes = 0
        if not _keeps_every_byte(document):
            return
        alphabet, vocab = byte_alphabet(), document["model"]["vocab"]
        # The model drops the bytes that its vocabulary has no token for.
        self._lost = bytes(byte for char, byte in alphabet.items() if char not in vocab)
        longest = max(map(len, vocab))
        added = [len(token["content"].encode()) for token in document.get("added_tokens", ())]
        self._max_token_bytes = max(longest, *added, 1) * _shrink(document.get("normalizer"))

    def min_tokens(self, text: str) -> int:
        if not self._max_token_bytes:
            return 0
        kept = text.encode().translate(None, self._lost)
        return -(-len(kept) // self._max_token_bytes)


def _keeps_every_byte(document: dict[str, Any]) -> bool:
    """Whether no step of the tokenizer drops or folds text, beyond what `_shrink` knows."""
    return (
        document["model"]["type"] == "BPE"
        and _shrink(document.get("normalizer")) > 0
        and _has_byte_level(document.get("pre_tokenizer"))
        # Such a token takes in any run of spaces beside it.
        and not any(t["lstrip"] or t["rstrip"] for t in document.get("added_tokens", ()))
    )


def _shrink(normalizer: dict[str, Any] | None) -> int:
    """By how much the normalizer shortens a text at most; 0 where that is not known."""
    if normalizer is None:
        return 1
    return _MAX_NFC_SHRINK if normalizer["type"] == "NFC" else 0


def _has_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = _flatten(pre_tokenizer)
    known = all(
        step["type"] in ("ByteLevel", "Digits")
        or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    return known and any(step["type"] == "ByteLevel" for step in steps)


def _flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step["pretokenizers"] for part in _flatten(inner)]
