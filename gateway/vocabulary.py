"""What each token id stands for in bytes, worked out once from tokenizer.json.

A token of a byte-level vocabulary is often only a part of a character, so the table holds
bytes; joining the bytes of a sequence and decoding them once is the whole of detokenizing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes by token id, and the text of those that are whole characters by themselves.

    The `visible_` lists are the same with the special tokens left empty. Every list is as
    long as the model's vocabulary; ids that no token has are empty.
    """

    pieces: list[bytes]
    texts: list[str | None]
    visible_pieces: list[bytes]
    visible_texts: list[str | None]


def token_table(
    document: dict[str, Any], vocab_size: int, id_to_token: Callable[[int], str | None]
) -> TokenTable | None:
    """The table of a parsed tokenizer.json; None unless it is byte-level or metaspace.

    `id_to_token` is the tokenizers library's, which knows what its decoder is given for an
    added token: not always the content, the normalizer may have changed it.
    No leading space is taken off, although one-shot decoders of metaspace vocabularies do
    so: a completion goes on where its prompt ended.
    """
    to_bytes = _piece_decoder(document.get("decoder"))
    if to_bytes is None:
        return None
    pieces = [b""] * vocab_size
    for token, token_id in _vocabulary(document["model"]):
        if token_id < vocab_size:
            pieces[token_id] = to_bytes(token)
    visible = list(pieces)
    for added in document.get("added_tokens", ()):
        if added["id"] >= vocab_size:
            continue
        piece = to_bytes(id_to_token(added["id"]) or "")
        pieces[added["id"]] = visible[added["id"]] = piece
        if added["special"]:
            visible[added["id"]] = b""
    return TokenTable(pieces, [*map(_whole, pieces)], visible, [*map(_whole, visible)])


def fallback_bytes(document: dict[str, Any]) -> dict[int, int]:
    """Bytes by token id, of the `<0xNN>` tokens that the decoder joins to characters.

    Empty unless all 256 are there: then every text can be spelled with them.
    """
    if not any(step["type"] == "ByteFallback" for step in _flatten(document.get("decoder"))):
        return {}
    found = {
        token_id: int(match[1], 16)
        for token, token_id in _vocabulary(document["model"])
        if (match := _BYTE_TOKEN.fullmatch(token))
    }
    return found if len(set(found.values())) == 256 else {}


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies, as GPT-2 chose them.

    Printable bytes stand for themselves; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
    return alphabet


class _ByteLevel:
    """Every character of a token stands for one byte."""

    def __init__(self) -> None:
        self._byte_of = byte_alphabet()

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:
            return token.encode()


class _Metaspace:
    """Plain text with a stand-in for the space, and `<0xNN>` tokens where bytes fall back."""

    def __init__(self, stand_in: str, has_byte_fallback: bool) -> None:
        self._stand_in = stand_in
        self._has_byte_fallback = has_byte_fallback

    def __call__(self, token: str) -> bytes:
        if self._has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(self._stand_in, " ").encode()


def _piece_decoder(decoder: dict[str, Any] | None) -> _ByteLevel | _Metaspace | None:
    steps = _flatten(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevel()
    stand_in = ""
    has_byte_fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "}:
                stand_in = pattern
            case {"type": "Metaspace", "replacement": str(replacement)}:
                stand_in = replacement
            case {"type": "ByteFallback"}:
                has_byte_fallback = True
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "stop": 0}:
                pass
            case _:
                return None
    return _Metaspace(stand_in, has_byte_fallback) if stand_in else None


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _vocabulary(model: dict[str, Any]) -> list[tuple[str, int]]:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return list(vocab.items())
    # Unigram: [token, score] by id.
    return [(token, token_id) for token_id, (token, _) in enumerate(vocab)]


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
