"""Whatever the vocabulary, the tokens and their batches, text comes as if made all at once.

Vocabularies, bytes and chunkings are drawn; the reference decodes and searches the whole.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop import StopMatcher
from gateway.text_stream import TextPiece, TextStream
from tests.gateway.random_vocabularies import (
    CHARACTERS,
    Vocabulary,
    byte_level,
    metaspace,
    unknown_decoder,
)
from tests.gateway.text_reference import WholeText, complete_text, held_back

NUM_VOCABULARIES = 18
TEXTS = st.text(alphabet=CHARACTERS, max_size=12)
# So that strings overlap themselves and each other.
FEW_LETTERS = st.text(alphabet="ab", max_size=10)
# The same examples every time: what they find does not depend on the day.
SETTINGS = settings(
    deadline=None,
    max_examples=150,
    derandomize=True,
)


@cache
def vocabularies() -> list[Vocabulary]:
    """A third of each kind."""
    kinds = (byte_level, metaspace, unknown_decoder)
    return [make(seed) for seed in range(NUM_VOCABULARIES // len(kinds)) for make in kinds]


@dataclass(frozen=True)
class Case:
    """Tokens of a vocabulary, in batches, with the bytes of each."""

    vocabulary: Vocabulary
    skip_special_tokens: bool
    batches: list[list[int]]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for batch in self.batches for token_id in batch]

    @property
    def whole(self) -> WholeText:
        return WholeText(
            self.vocabulary.bytes_of(self.token_ids, skip_special_tokens=self.skip_special_tokens)
        )

    def stream(self, matcher: StopMatcher | None = None, min_tokens: int = 0) -> TextStream:
        detokenizer = self.vocabulary.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens
        )
        return TextStream(detokenizer, matcher, min_tokens)


@st.composite
def tokens_of(draw: st.DrawFn, vocabulary: Vocabulary) -> list[int]:
    """Some spell text, with others in its middle or a part missing; some spell anything."""
    highest = len(vocabulary.pieces) - 1
    # The longer tokens, and the added ones, come last.
    any_token = st.one_of(st.integers(0, highest), st.integers(highest - 16, highest))
    token_ids = list[int]()
    for text in draw(st.lists(st.one_of(TEXTS, FEW_LETTERS), max_size=3)):
        spelled = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(spelled))] * 2)))
        # Often a special token between two bytes of a character.
        between = draw(st.lists(any_token, max_size=2))
        token_ids += spelled[:begin] + between + spelled[end if draw(st.booleans()) else begin :]
    return token_ids + draw(st.lists(any_token, max_size=4))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocabulary = vocabularies()[draw(st.integers(0, NUM_VOCABULARIES - 1))]
    token_ids = draw(tokens_of(vocabulary))
    cuts = draw(st.lists(st.integers(0, len(token_ids)), max_size=len(token_ids)))
    borders = [0, *sorted(cuts), len(token_ids)]
    batches = [token_ids[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    return Case(vocabulary, draw(st.booleans()), batches)


@st.composite
def stop_strings_for(draw: st.DrawFn, text: str) -> list[str]:
    """Cut out of the text, or nearly, so that they match, overlap and disappoint; or drawn anew."""
    stops = draw(st.lists(st.text(alphabet="ab\ufffd", min_size=1, max_size=4), max_size=2))
    for _ in range(draw(st.integers(1, 3))):
        # Often the very end, which only the flush may complete.
        begin = draw(
            st.one_of(
                st.integers(0, len(text)),
                st.integers(0, len(text)).map(lambda size: max(len(text) - size % 4, 0)),
            )
        )
        stop = text[begin : begin + draw(st.integers(1, 6))]
        # Also an end of it, to be complete at the same place.
        stops += [stop + draw(st.sampled_from(["", "", *CHARACTERS])), stop[1:]]
    return [stop for stop in stops if stop] or ["ab"]


@SETTINGS
@given(case=cases())
def test_one_token_after_another_gives_what_decoding_all_bytes_gives(case: Case) -> None:
    tokenizer = case.vocabulary.tokenizer
    detokenizer = tokenizer.detokenizer(skip_special_tokens=case.skip_special_tokens)
    whole, told = case.whole, ""
    for count, token_id in enumerate(case.token_ids, start=1):
        told += detokenizer.feed(token_id)
        # Everything that is a whole character, and nothing of one that is not.
        assert told == whole.after(count)
    assert told + detokenizer.flush() == whole.text
    assert detokenizer.flush() == ""


@SETTINGS
@given(case=cases())
def test_the_tokenizers_library_decodes_the_same_but_for_what_it_gives_up(case: Case) -> None:
    told = case.stream()
    text = "".join(
        piece.text for piece in (told.feed(case.token_ids), told.finish()) if piece is not None
    )
    library = case.vocabulary.tokenizer.decode(
        case.token_ids, skip_special_tokens=case.skip_special_tokens
    )
    if case.vocabulary.gives_up and not is_valid(case.whole.pieces):
        # One invalid byte makes the library give up the valid ones beside it, too.
        return
    if case.vocabulary.takes_off_space:
        # A completion goes on after its prompt, and keeps its leading space.
        text = text.removeprefix(" ")
    assert text == library


def is_valid(pieces: Sequence[bytes]) -> bool:
    try:
        b"".join(pieces).decode()
    except UnicodeDecodeError:
        return False
    return True


@SETTINGS
@given(place=st.integers(0, NUM_VOCABULARIES - 1), text=TEXTS)
def test_text_comes_back_from_any_vocabulary(place: int, text: str) -> None:
    vocabulary = vocabularies()[place]
    token_ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(vocabulary.tokenizer.detokenizer(skip_special_tokens=True), None)
    pieces = [stream.feed([token_id]) for token_id in token_ids] + [stream.finish()]
    told = "".join(piece.text for piece in pieces if piece is not None)
    assert told == (vocabulary.prefix + text if text else "")


@SETTINGS
@given(case=cases())
def test_every_token_comes_with_the_delta_that_ends_it(case: Case) -> None:
    stream, whole = case.stream(), case.whole
    ends = [whole.end_of(count) for count in range(1, len(case.token_ids) + 1)]
    shown_text, shown_ids, num_fed = "", list[int](), 0
    for batch in case.batches:
        piece = stream.feed(batch)
        num_fed += len(batch)
        if piece is None:
            continue
        assert piece.text
        shown_text += piece.text
        shown_ids += piece.token_ids
        assert shown_ids == case.token_ids[: bisect_right(ends[:num_fed], len(shown_text))]
    last = stream.finish()
    shown_ids += last.token_ids if last is not None else []
    assert shown_ids + stream.unshown_token_ids == case.token_ids
    assert stream.num_tokens == len(case.token_ids)


@dataclass(frozen=True)
class StopCase:
    """A case with stop strings."""

    case: Case
    stop_strings: list[str]
    include: bool
    min_tokens: int


@st.composite
def stop_cases(draw: st.DrawFn) -> StopCase:
    case = draw(cases())
    num_tokens = len(case.token_ids)
    # Often none, and often one more than there are: then nothing stops, not even at the end.
    chosen = st.one_of(st.just(0), st.just(num_tokens + 1), st.integers(1, num_tokens + 1))
    min_tokens = draw(chosen)
    stops = draw(stop_strings_for(case.whole.text))
    return StopCase(case, stops, draw(st.booleans()), min_tokens)


@settings(SETTINGS, max_examples=600)
@given(stop_case=stop_cases())
def test_stop_strings_are_found_where_a_search_of_the_whole_finds_them(
    stop_case: StopCase,
) -> None:
    case, whole = stop_case.case, stop_case.case.whole
    matcher = StopMatcher(stop_case.stop_strings, include_stop_string=stop_case.include)
    stream = case.stream(matcher, stop_case.min_tokens)
    ending = whole.ending(stop_case.stop_strings, stop_case.min_tokens)
    pieces = list[TextPiece | None]()
    num_fed = 0
    for batch in case.batches:
        if stream.stop_string is not None:
            break
        pieces.append(stream.feed(batch))
        num_fed += len(batch)
        if stream.stop_string is None:
            text = whole.after(num_fed)
            assert text_of(pieces) == text.removesuffix(held_back(text, stop_case.stop_strings))
    if stream.stop_string is None:
        pieces.append(stream.finish())
    assert all(piece.text for piece in pieces if piece is not None)
    ids = [token_id for piece in pieces if piece is not None for token_id in piece.token_ids]
    assert ids + stream.unshown_token_ids == case.token_ids[: stream.num_tokens]
    if ending is None:
        assert stream.stop_string is None
        assert text_of(pieces) == whole.text
        assert stream.num_tokens == len(case.token_ids)
        return
    assert (stream.stop_string, stream.num_tokens) == (ending.stop_string, ending.num_tokens)
    size = 0 if stop_case.include else len(ending.stop_string)
    assert text_of(pieces) == whole.text[: ending.num_chars - size]


def text_of(pieces: Sequence[TextPiece | None]) -> str:
    return "".join(piece.text for piece in pieces if piece is not None)


def test_the_reference_leaves_out_what_is_only_begun() -> None:
    whole = "aé世😀".encode()
    expected = ["", "a", "a", "aé", "aé", "aé", "aé世", "aé世", "aé世", "aé世", "aé世😀"]
    assert [complete_text(whole[:size]) for size in range(len(whole) + 1)] == expected
    # Bytes that no character begins with are faults at once.
    assert complete_text(b"a\x80") == "a\ufffd"
    assert complete_text(b"\xe4\x41") == "\ufffdA"
