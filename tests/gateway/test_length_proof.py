"""What is said of a text's length without encoding it is never more than the truth."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.length_proof import LengthProof
from gateway.tokenizer import TextTokenizer
from gateway.vocabulary import byte_alphabet

BYTE_LEVEL: dict[str, Any] = {
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {char: byte for char, byte in byte_alphabet().items()}},
}
# The longest tokens, those that the vocabulary lacks a byte for, and anything else.
PARTS = st.one_of(
    st.sampled_from(["\n" + " " * 80, "<|im_end|>", "\U000f1234", "\x06", "=" * 64]),
    st.text(max_size=20),
)


@settings(deadline=None, max_examples=300)
@given(parts=st.lists(PARTS, max_size=30))
def test_a_text_has_at_least_the_tokens_that_are_proved(
    smollm2: TextTokenizer, parts: list[str]
) -> None:
    text = "".join(parts)
    assert smollm2.min_tokens(text) <= len(smollm2.encode(text, add_special_tokens=False))


def test_long_plain_text_is_proved_long(smollm2: TextTokenizer) -> None:
    assert smollm2.min_tokens("word " * 10_000) >= 600


def test_bytes_that_every_token_covers_alone_are_counted() -> None:
    assert LengthProof(BYTE_LEVEL).min_tokens("aé") == 3


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Strip", "left": True, "right": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"},
                    {"type": "ByteLevel"},
                ],
            }
        },
        {"added_tokens": [{"content": "<mask>", "lstrip": True, "rstrip": False}]},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
    ],
)
def test_a_tokenizer_that_may_drop_text_proves_nothing(change: dict[str, Any]) -> None:
    assert LengthProof(BYTE_LEVEL | change).min_tokens("a" * 1000) == 0


def test_composition_is_allowed_for() -> None:
    proof = LengthProof(BYTE_LEVEL | {"normalizer": {"type": "NFC"}})
    # Three letters of three bytes each become one of three.
    assert proof.min_tokens("\u1112\u1161\u11ab") == 3
