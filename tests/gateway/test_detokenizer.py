"""Tokens become text piece by piece exactly as they would all at once."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer
from gateway.tokenizer import TemplateLimits, TextTokenizer
from tests.gateway.conftest import SMOLLM2_VOCAB_SIZE
from tests.gateway.synthetic_tokenizers import BYTE_FALLBACK_DECODER, WORDS, metaspace_files

SMOLLM2_IDS = st.lists(
    # The first few hundred ids hold the special tokens and the single bytes.
    st.one_of(st.integers(0, 300), st.integers(0, 49151)),
    max_size=60,
)
FIRST_WORD_ID = 259
METASPACE_IDS = st.lists(st.integers(0, 258 + len(WORDS)), max_size=60)
# Session fixtures with hypothesis: the tokenizer never changes between examples.
SETTINGS = settings(deadline=None, max_examples=300)


def feed_all(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


def metaspace_bytes(token_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
    special = [b"<unk>", b"<s>", b"</s>"]
    pieces = [b"" if skip_special_tokens else token for token in special]
    pieces += [bytes([byte]) for byte in range(256)]
    pieces += [word.replace("▁", " ").encode() for word in WORDS]
    return b"".join(pieces[token_id] for token_id in token_ids)


@SETTINGS
@given(token_ids=SMOLLM2_IDS, skip=st.booleans())
def test_any_byte_level_tokens_give_the_text_of_one_shot_decoding(
    smollm2: TextTokenizer, token_ids: list[int], skip: bool
) -> None:
    pieces = feed_all(smollm2.detokenizer(skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == smollm2.decode(token_ids, skip_special_tokens=skip)


@SETTINGS
@given(token_ids=METASPACE_IDS, skip=st.booleans())
def test_any_metaspace_tokens_give_the_text_of_all_their_bytes(
    metaspace: TextTokenizer, token_ids: list[int], skip: bool
) -> None:
    pieces = feed_all(metaspace.detokenizer(skip_special_tokens=skip), token_ids)
    whole = metaspace_bytes(token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole.decode(errors="replace")


@SETTINGS
@given(text=st.text(max_size=80))
def test_text_comes_back_as_it_was(smollm2: TextTokenizer, text: str) -> None:
    # This vocabulary lacks the first byte of some planes, and drops it when it encodes.
    token_ids = smollm2.encode(text, add_special_tokens=False)
    whole = smollm2.decode(token_ids, skip_special_tokens=False)
    pieces = feed_all(smollm2.detokenizer(skip_special_tokens=False), token_ids)
    assert "".join(pieces) == whole


@SETTINGS
@given(text=st.text(alphabet="the world aé世😀\ufffd", max_size=40))
def test_text_without_invalid_bytes_is_what_the_tokenizers_library_decodes(
    metaspace: TextTokenizer, text: str
) -> None:
    token_ids = metaspace.encode(text, add_special_tokens=False)
    pieces = feed_all(metaspace.detokenizer(skip_special_tokens=True), token_ids)
    # The library takes off the leading space; a completion goes on after its prompt.
    assert "".join(pieces).removeprefix(" ") == metaspace.decode(
        token_ids, skip_special_tokens=True
    )


def test_a_character_is_held_until_it_is_whole(smollm2: TextTokenizer) -> None:
    token_ids = smollm2.encode("😀", add_special_tokens=False)
    assert len(token_ids) > 1
    detokenizer = smollm2.detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.feed(token_id) for token_id in token_ids]
    assert pieces == [*[""] * (len(token_ids) - 1), "😀"]
    assert not detokenizer.is_incomplete
    assert detokenizer.flush() == ""


def test_a_character_never_completed_is_flushed_once(smollm2: TextTokenizer) -> None:
    token_ids = smollm2.encode("😀", add_special_tokens=False)
    detokenizer = smollm2.detokenizer(skip_special_tokens=True)
    for token_id in token_ids[:-1]:
        detokenizer.feed(token_id)
    assert detokenizer.is_incomplete
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_real_replacement_character_is_kept(smollm2: TextTokenizer) -> None:
    token_ids = smollm2.encode("ok\ufffd", add_special_tokens=False)
    pieces = feed_all(smollm2.detokenizer(skip_special_tokens=True), token_ids)
    assert "".join(pieces) == "ok\ufffd"


def test_ids_that_no_token_has_are_empty(metaspace: TextTokenizer) -> None:
    detokenizer = metaspace.detokenizer(skip_special_tokens=True)
    assert [detokenizer.feed(299), detokenizer.flush()] == ["", ""]


def test_a_plain_metaspace_decoder_is_known_too() -> None:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    tokenizer = TextTokenizer(metaspace_files(decoder), 300, TemplateLimits())
    token_ids = [FIRST_WORD_ID + WORDS.index(word) for word in ("▁the", "▁wor", "ld")]
    pieces = feed_all(tokenizer.detokenizer(skip_special_tokens=True), token_ids)
    assert "".join(pieces) == " the world"


def test_an_added_token_reads_as_its_normalized_form(metaspace_with_tools: TextTokenizer) -> None:
    token_ids = metaspace_with_tools.encode("a <tool>", add_special_tokens=False)
    pieces = feed_all(metaspace_with_tools.detokenizer(skip_special_tokens=False), token_ids)
    assert pieces[-2:] == [" <tool>", ""]
    assert metaspace_with_tools.decode(token_ids, skip_special_tokens=False) == "a <tool>"


def test_a_normalized_special_token_is_left_out_like_any_other(
    metaspace_with_tools: TextTokenizer,
) -> None:
    end = metaspace_with_tools.encode("a <end>", add_special_tokens=False)[-1]
    for skip, text in ((True, "aa"), (False, "a <end>a")):
        token_ids = [FIRST_WORD_ID + WORDS.index("a"), end, FIRST_WORD_ID + WORDS.index("a")]
        assert metaspace_with_tools.decode(token_ids, skip_special_tokens=skip) == text
        detokenizer = metaspace_with_tools.detokenizer(skip_special_tokens=skip)
        assert "".join(feed_all(detokenizer, token_ids)) == text


@pytest.fixture
def metaspace_with_tools() -> TextTokenizer:
    built = tokenizers.Tokenizer.from_buffer(metaspace_files()["tokenizer.json"])
    built.add_tokens([tokenizers.AddedToken("<tool>", normalized=True)])
    built.add_special_tokens([tokenizers.AddedToken("<end>", normalized=True)])
    return TextTokenizer({"tokenizer.json": built.to_str().encode()}, 300, TemplateLimits())


def word_piece_tokenizer() -> TextTokenizer:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "##ed": 3, "the": 4, "world": 5}
    built = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return TextTokenizer({"tokenizer.json": built.to_str().encode()}, 6, TemplateLimits())


@SETTINGS
@given(token_ids=st.lists(st.integers(1, 5), max_size=80))
def test_an_unknown_decoder_takes_the_slower_way_to_the_same_text(token_ids: list[int]) -> None:
    tokenizer = word_piece_tokenizer()
    pieces = feed_all(tokenizer.detokenizer(skip_special_tokens=True), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


def unknown_step(decoder: dict[str, Any]) -> dict[str, Any]:
    """The decoder with a last step that the table does not know, and that changes no text here."""
    last = {"type": "Replace", "pattern": {"Regex": "z{99}"}, "content": ""}
    return {"type": "Sequence", "decoders": [decoder, last]}


def byte_ids(text: str | bytes) -> list[int]:
    """Of the tokens for single bytes."""
    return [3 + byte for byte in (text.encode() if isinstance(text, str) else text)]


@pytest.fixture(scope="module")
def slow_metaspace() -> TextTokenizer:
    files = metaspace_files(unknown_step(BYTE_FALLBACK_DECODER))
    return TextTokenizer(files, 300, TemplateLimits())


@pytest.mark.parametrize("text", ["丗" * 50, "\ufffd" * 5 + "丗", "\ufffd" * 40 + "😀", "a丗" * 20])
def test_an_unknown_decoder_keeps_characters_made_of_bytes(
    slow_metaspace: TextTokenizer, text: str
) -> None:
    detokenizer = slow_metaspace.detokenizer(skip_special_tokens=True)
    for character in text:
        *begun, last = byte_ids(character)
        assert [detokenizer.feed(token_id) for token_id in begun] == [""] * len(begun)
        assert detokenizer.is_incomplete == bool(begun)
        assert detokenizer.feed(last) == character
        assert not detokenizer.is_incomplete
    assert detokenizer.flush() == ""


def test_an_unknown_decoder_replaces_no_more_than_the_invalid_bytes(
    slow_metaspace: TextTokenizer,
) -> None:
    # A stray byte, a character cut short by a character, by a word, by the end.
    data = "丗".encode() + b"\x80" + b"\xe4\xb8" + "é".encode() + b"\xf0\x9f"
    token_ids = [*byte_ids(data), FIRST_WORD_ID + WORDS.index("▁wor"), *byte_ids(b"\xe4\xb8")]
    pieces = feed_all(slow_metaspace.detokenizer(skip_special_tokens=True), token_ids)
    assert "".join(pieces) == "丗\ufffd\ufffdé\ufffd wor\ufffd"


def test_an_unknown_decoder_joins_the_bytes_around_what_is_left_out(
    slow_metaspace: TextTokenizer,
) -> None:
    first, *others = byte_ids("丗")
    # A special token, and an id that no token has, often.
    token_ids = [first, *[1, 299] * 20, *others]
    pieces = feed_all(slow_metaspace.detokenizer(skip_special_tokens=True), token_ids)
    assert pieces == [*[""] * (len(token_ids) - 1), "丗", ""]


@SETTINGS
@given(token_ids=METASPACE_IDS, skip=st.booleans())
def test_any_tokens_of_an_unknown_byte_fallback_decoder_give_the_text_of_their_bytes(
    slow_metaspace: TextTokenizer, token_ids: list[int], skip: bool
) -> None:
    pieces = feed_all(slow_metaspace.detokenizer(skip_special_tokens=skip), token_ids)
    whole = metaspace_bytes(token_ids, skip_special_tokens=skip).decode(errors="replace")
    # As this decoder does where a text begins.
    assert "".join(pieces) == whole.removeprefix(" ")


@pytest.fixture(scope="module")
def slow_smollm2(smollm2_files: dict[str, bytes]) -> TextTokenizer:
    document = json.loads(smollm2_files["tokenizer.json"])
    document["decoder"] = unknown_step(document["decoder"])
    files = {"tokenizer.json": json.dumps(document).encode()}
    return TextTokenizer(files, SMOLLM2_VOCAB_SIZE, TemplateLimits())


@SETTINGS
@given(token_ids=SMOLLM2_IDS, skip=st.booleans())
def test_any_tokens_of_an_unknown_byte_level_decoder_give_the_text_of_one_shot_decoding(
    slow_smollm2: TextTokenizer, token_ids: list[int], skip: bool
) -> None:
    pieces = feed_all(slow_smollm2.detokenizer(skip_special_tokens=skip), token_ids)
    assert "".join(pieces) == slow_smollm2.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["\ufffd" * 17 + "丗", "丗" * 20, "😀\ufffd" * 10])
def test_a_byte_level_decoder_with_an_unknown_step_keeps_every_character(
    slow_smollm2: TextTokenizer, text: str
) -> None:
    token_ids = slow_smollm2.encode(text, add_special_tokens=False)
    pieces = feed_all(slow_smollm2.detokenizer(skip_special_tokens=True), token_ids)
    assert "".join(pieces) == text
