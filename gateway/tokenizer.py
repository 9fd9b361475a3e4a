"""Text and chats to token ids and back, from the files that a worker hands out.

Everything here blocks and may take long: `gateway.encoding` calls it off the event loop.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

from gateway.chat_template import ChatTemplate
from gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from gateway.length_proof import LengthProof
from gateway.vocabulary import TokenTable, fallback_bytes, token_table

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may cost."""

    max_chars: int = 8 << 20
    max_seconds: float = 2.0


class Tokenizer(Protocol):
    """One model's tokenizer. Safe to share by threads."""

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A rendered chat holds its special tokens already: pass False for it.

        Raises NoTextError where the model has no vocabulary.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What it reads by itself, special tokens too; often a part of a character."""
        ...

    def min_tokens(self, text: str) -> int:
        """A number of tokens that this text has at least, told without encoding it."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new one, for one completion."""
        ...


class NoTextError(Exception):
    """The model came without a tokenizer."""


class TokenizerFaultError(Exception):
    """The tokenizers library panicked: a fault of its own, or of the files."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Makes a panic of the tokenizers library an error like any other.

    It comes as a BaseException, which those who end a failed request do not look for: the
    call would never get a status.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as panic:
        raise TokenizerFaultError(f"the tokenizers library panicked: {panic}") from panic


def build_tokenizer(
    files: Mapping[str, bytes], vocab_size: int, limits: TemplateLimits
) -> Tokenizer:
    """From a worker's bundle. Raises what the files' parsers raise."""
    if TOKENIZER_FILE not in files:
        return NumberTokenizer(vocab_size)
    return TextTokenizer(files, vocab_size, limits)


class TextTokenizer:
    """A tokenizer of the Hugging Face kind."""

    def __init__(self, files: Mapping[str, bytes], vocab_size: int, limits: TemplateLimits) -> None:
        config = json.loads(files.get(CONFIG_FILE) or b"{}")
        special_tokens = _special_tokens(config)
        with panics_as_errors():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
        # Left over from training; here every token counts, and none is made up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        document = json.loads(files[TOKENIZER_FILE])
        self._table = token_table(document, vocab_size, self._tokenizer.id_to_token)
        self._fallback_bytes = fallback_bytes(document)
        self._special_ids = {
            added["id"] for added in document.get("added_tokens", ()) if added["special"]
        }
        self._length_proof = LengthProof(document)
        self.chat_template = _chat_template(files, config, special_tokens, limits)
        self.bos_token_id: int | None = None
        if "bos_token" in special_tokens:
            self.bos_token_id = self._tokenizer.token_to_id(special_tokens["bos_token"])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Releases the GIL. The `fast` variant leaves out the offsets: a third less time.
        with panics_as_errors():
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            # The library looks for their content, and misses those that the normalizer changes.
            token_ids = [token_id for token_id in token_ids if token_id not in self._special_ids]
        with panics_as_errors():
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        if self._table is not None:
            return self._table.pieces[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def min_tokens(self, text: str) -> int:
        return self._length_proof.min_tokens(text)

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table, skip_special_tokens=skip_special_tokens)

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=False)

        def is_silent(token_id: int) -> bool:
            is_left_out = skip_special_tokens and token_id in self._special_ids
            return is_left_out or self._tokenizer.id_to_token(token_id) is None

        return WindowDetokenizer(decode, is_silent, self._fallback_bytes)


class NumberTokenizer:
    """For a model without a vocabulary, as benchmarks have them: a token's text is its number."""

    chat_template: ChatTemplate | None = None
    bos_token_id: int | None = None

    def __init__(self, vocab_size: int) -> None:
        pieces = [f"{token_id} ".encode() for token_id in range(vocab_size)]
        texts: list[str | None] = [piece.decode() for piece in pieces]
        self._table = TokenTable(pieces, texts, pieces, texts)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise NoTextError("the served model has no tokenizer; send token_ids")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self._table.pieces[token_id] for token_id in token_ids).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.pieces[token_id]

    def min_tokens(self, text: str) -> int:
        return 0

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        return ByteDetokenizer(self._table, skip_special_tokens=skip_special_tokens)


def _chat_template(
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    limits: TemplateLimits,
) -> ChatTemplate | None:
    source = _template_source(files, config)
    if not source:
        return None
    return ChatTemplate(
        source, special_tokens, max_chars=limits.max_chars, max_seconds=limits.max_seconds
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            found[name] = str(token)
    return found


def _template_source(
    files: Mapping[str, bytes], config: Mapping[str, Any]
) -> str | dict[str, str] | None:
    """The template file, or else what the configuration holds: one, or a list of named ones."""
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode()
    inline = config.get("chat_template")
    if isinstance(inline, list):
        return {entry["name"]: entry["template"] for entry in inline}
    return inline
