"""Tokens become text piece by piece exactly as they would all at once."""

from collections.abc import Sequence

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer
from gateway.tokenizer import TemplateLimits, TextTokenizer
from tests.gateway.synthetic_tokenizers import WORDS, metaspace_files

SMOLLM2_IDS = st.lists(
    # The first few hundred ids hold the special tokens and the single bytes.
    st.one_of(st.integers(0, 300), st.integers(0, 49151)),
    max_size=60,
)
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
    token_ids = [259 + WORDS.index(word) for word in ("▁the", "▁wor", "ld")]
    pieces = feed_all(tokenizer.detokenizer(skip_special_tokens=True), token_ids)
    assert "".join(pieces) == " the world"


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
