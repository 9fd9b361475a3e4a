"""Stop strings are found wherever they fall, and nothing else is held back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop import StopMatcher
from gateway.text_stream import TextStream
from gateway.tokenizer import TextTokenizer
from shared.pb.tandem.v1 import inference_pb2 as pb
from tests.answers import Collected, collect
from tests.gateway.client import text
from tests.gateway.conftest import MakeWorker, StartGateway, StartQuiet
from tests.gateway.fake_worker import FakeWorker

# A small alphabet, so that strings overlap themselves and each other.
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)
TEXTS = st.text(alphabet="abc", max_size=40)


def first_match(whole: str, stops: list[str], *, after: int = 0) -> tuple[int, str] | None:
    """Where the match that completes first ends, and the longest stop that ends there."""
    for end in range(after + 1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    whole = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@settings(max_examples=1000, deadline=None)
@given(stops=STOPS, chunks=chunked(), include=st.booleans())
def test_every_chunking_gives_what_a_search_of_the_whole_text_gives(
    stops: list[str], chunks: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop_string=include)
    shown = "".join(matcher.feed(chunk) for chunk in chunks)
    whole = "".join(chunks)
    found = first_match(whole, stops)
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == whole
    else:
        end, stop = found
        assert matcher.matched == stop
        assert shown == whole[: end if include else end - len(stop)]
        assert matcher.flush() == ""


@settings(max_examples=500, deadline=None)
@given(stops=STOPS, whole=TEXTS)
def test_only_the_longest_beginning_of_a_stop_is_held_back(stops: list[str], whole: str) -> None:
    if first_match(whole, stops) is not None:
        return
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(char) for char in whole)
    beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
    held = max((b for b in beginnings if whole.endswith(b)), key=len, default="")
    assert shown == whole.removesuffix(held)


@settings(max_examples=1000, deadline=None)
@given(stops=STOPS, chunks=chunked(), num_free=st.integers(0, 8))
def test_a_stop_that_is_complete_too_early_is_text(
    stops: list[str], chunks: list[str], num_free: int
) -> None:
    matcher, whole = StopMatcher(stops), "".join(chunks)
    shown = "".join(matcher.feed(chunk, i >= num_free) for i, chunk in enumerate(chunks))
    free_chars = len("".join(chunks[:num_free]))
    found = first_match(whole, stops, after=free_chars)
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == whole
    else:
        end, stop = found
        assert matcher.matched == stop
        assert shown == whole[: end - len(stop)]


def test_a_stop_that_may_not_stop_is_not_held_back() -> None:
    matcher = StopMatcher(["STOP", "OPEN"])
    # Its end may yet begin another.
    assert matcher.feed("a STOP", False) == "a ST"
    assert matcher.feed(" b", False) == "OP b"
    assert matcher.feed("STOP", True) == ""
    assert matcher.matched == "STOP"


def test_characters_with_a_meaning_in_patterns_are_plain() -> None:
    for stop in ("]", "^", "-", "\\", "[a-z]", ".*", "&&"):
        matcher = StopMatcher([stop, "z-"])
        assert matcher.feed(f"abc{stop}d") == "abc"
        assert matcher.matched == stop


def test_sixteen_long_overlapping_stops_stay_linear() -> None:
    stops = ["a" * 239 + "b" + "a" * size for size in range(16)]
    matcher = StopMatcher(stops)
    shown = sum(len(matcher.feed("a" * 1000)) for _ in range(100))
    # Quadratic work would be 24 million steps and time out.
    assert shown == 100_000 - 239


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop(
    smollm2: TextTokenizer,
) -> None:
    token_ids = smollm2.encode("one STOPx and on", add_special_tokens=False)
    detokenizer = smollm2.detokenizer(skip_special_tokens=True)
    stream = TextStream(detokenizer, StopMatcher(["STOP"]))
    piece = stream.feed(token_ids)
    assert piece is not None
    assert piece.text == "one "
    ending = smollm2.decode(token_ids[: stream.num_tokens], skip_special_tokens=True)
    before = smollm2.decode(token_ids[: stream.num_tokens - 1], skip_special_tokens=True)
    assert "STOP" in ending
    assert "STOP" not in before
    assert piece.token_ids == token_ids[: stream.num_tokens]


def test_a_token_comes_with_the_delta_that_shows_its_last_character(
    smollm2: TextTokenizer,
) -> None:
    emoji = smollm2.encode("😀", add_special_tokens=False)
    (letter,) = smollm2.encode("a", add_special_tokens=False)
    stream = TextStream(smollm2.detokenizer(skip_special_tokens=True), None)
    first = stream.feed([letter, *emoji[:-1]])
    assert first is not None
    assert (first.text, first.token_ids) == ("a", [letter])
    second = stream.feed(emoji[-1:])
    assert second is not None
    assert (second.text, second.token_ids) == ("😀", emoji)


def test_no_stop_string_stops_before_min_tokens(smollm2: TextTokenizer) -> None:
    token_ids = smollm2.encode("go STOP go STOP go", add_special_tokens=False)
    texts = [smollm2.decode([token_id], skip_special_tokens=True) for token_id in token_ids]
    # The token that completes the first "STOP" is the last that may not stop.
    first = next(i for i in range(len(texts)) if "STOP" in "".join(texts[: i + 1])) + 1

    def shown(min_tokens: int) -> tuple[str, int]:
        detokenizer = smollm2.detokenizer(skip_special_tokens=True)
        stream = TextStream(detokenizer, StopMatcher(["STOP"]), min_tokens)
        pieces = []
        for token_id in token_ids:
            pieces.append(stream.feed([token_id]))
            if stream.stop_string is not None:
                break
        else:
            pieces.append(stream.finish())
        return "".join(piece.text for piece in pieces if piece), stream.num_tokens

    assert shown(first) == ("go ", first)
    assert shown(first + 1)[0] == "go STOP go "
    assert shown(len(token_ids) + 1) == ("go STOP go STOP go", len(token_ids))


async def stopped(
    make_worker: MakeWorker, start_gateway: StartGateway, prompt: str, **stopping: object
) -> tuple[Collected, FakeWorker]:
    request = text(prompt, max_tokens=200, stopping=pb.StopConditions(**stopping))  # type: ignore[arg-type]
    async with make_worker(step_s=0.001) as worker, start_gateway(worker) as gateway:
        answer = await gateway.collect(request)
        if answer.finished.WhichOneof("matched") == "stop_string":
            await worker.until(lambda: worker.requests[0].abort_reply is False)
    return answer, worker


async def test_a_stop_across_tokens_ends_the_stream_and_the_work(
    make_worker: MakeWorker, start_gateway: StartGateway, served: TextTokenizer
) -> None:
    prompt = "one two STOPxyz" + " and on" * 50
    answer, worker = await stopped(make_worker, start_gateway, prompt, stop_strings=["STOPx"])
    assert answer.text == "one two "
    assert not any("S" in delta.text for delta in answer.deltas)
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP
    assert answer.finished.stop_string == "STOPx"
    num_tokens = answer.finished.usage.completion_tokens
    ids = served.encode(prompt, add_special_tokens=False)
    assert answer.token_ids == ids[:num_tokens]
    assert "STOPx" in served.decode(ids[:num_tokens], skip_special_tokens=True)
    assert "STOPx" not in served.decode(ids[: num_tokens - 1], skip_special_tokens=True)
    assert worker.requests[0].num_sent < len(ids)


async def test_a_false_beginning_is_let_go(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    answer, _ = await stopped(make_worker, start_gateway, "STOq done STO", stop_strings=["STOP"])
    assert answer.text == "STOq done STO"
    assert answer.finished.WhichOneof("matched") == "eos_token_id"


async def test_a_stop_string_is_kept_when_asked_for(
    make_worker: MakeWorker, start_gateway: StartGateway
) -> None:
    answer, _ = await stopped(
        make_worker,
        start_gateway,
        "I love Paris now",
        stop_strings=["Pari"],
        include_stop_string=True,
    )
    assert answer.text == "I love Pari"


async def test_a_stop_that_only_the_flush_completes_still_stops(
    quiet: StartQuiet, served: TextTokenizer
) -> None:
    cut = len(served.encode("ab😀", add_special_tokens=False)) - 1
    async with quiet() as pair:
        call = pair.gateway.stream(
            text("x", stopping=pb.StopConditions(stop_strings=["b\ufffd"]), max_tokens=cut)
        )
        request = await pair.worker.request()
        request.start()
        request.send_tokens(served.encode("ab😀", add_special_tokens=False)[:cut])
        request.finish()
        answer = await collect(call)
    assert answer.text == "a"
    assert answer.finished.stop_string == "b\ufffd"
    assert answer.finished.usage.completion_tokens == cut
