"""Both ends of the pipe speak the framing of multiprocessing's Connection, and never wait."""

import asyncio
import multiprocessing
import pickle
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.messages import Fatal, Load, StepOutput
from worker.pipe import EnginePipe, FrameDecoder, FrontPipe

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = multiprocessing.Pipe(duplex=True)
    yield ours, theirs
    theirs.close()


async def test_objects_go_both_ways_whatever_their_size(ends: Ends) -> None:
    ours, theirs = ends
    received: asyncio.Queue[object] = asyncio.Queue()
    closed = asyncio.Event()
    pipe = await FrontPipe.open(ours, received.put_nowait, closed.set)
    for size in (0, 1, 16_384, 16_385, 3_000_000):
        message = {"bytes": b"x" * size}
        pipe.send(message)
        assert await asyncio.to_thread(theirs.recv) == message
        await asyncio.to_thread(theirs.send, message)
        assert await asyncio.wait_for(received.get(), 5) == message
    pipe.close()
    await asyncio.wait_for(closed.wait(), 5)


async def test_sending_never_blocks_and_nothing_is_lost(ends: Ends) -> None:
    ours, theirs = ends
    pipe = await FrontPipe.open(ours, lambda _: None, lambda: None)
    blocks = [np.full(100_000, i) for i in range(50)]
    for block in blocks:
        pipe.send(block)
    pipe.close()
    for block in blocks:
        assert np.array_equal(await asyncio.to_thread(theirs.recv), block)
    with pytest.raises(EOFError):
        await asyncio.to_thread(theirs.recv)


async def test_the_end_of_the_other_side_is_told_after_its_last_object(ends: Ends) -> None:
    ours, theirs = ends
    heard: list[object] = []
    closed = asyncio.Event()
    pipe = await FrontPipe.open(ours, heard.append, closed.set)
    for number in range(100):
        theirs.send(number)
    theirs.close()
    await asyncio.wait_for(closed.wait(), 5)
    assert heard == list(range(100))
    pipe.send("into the void")
    pipe.close()


def frame(message: object) -> bytes:
    body = pickle.dumps(message)
    return struct.pack("!i", len(body)) + body


@given(
    messages=st.lists(st.binary(max_size=300), max_size=20),
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=50),
)
def test_frames_are_found_however_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(message) for message in messages)
    decoder, found, at = FrameDecoder(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += decoder.feed(stream[at : at + size])
        at += size
    assert found == messages


def test_a_frame_of_negative_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="length -1"):
        FrameDecoder().feed(struct.pack("!i", -1) + b"1234")


def one_token(number: int) -> StepOutput:
    return StepOutput(
        uids=np.array([number % 7]),
        token_ids=np.array([number], np.int32),
        load=Load(steps=number),
        committed_at=1.0,
    )


def read_tokens(end: Connection, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        assert end.poll(10)
        tokens += end.recv().token_ids.tolist()
    return tokens


def test_the_engine_never_waits_for_a_front_that_does_not_read(ends: Ends) -> None:
    front, engine = ends
    pipe = EnginePipe(engine)

    # Far more than the pipe holds: some hundred kilobytes.
    def send() -> None:
        for number in range(20_000):
            pipe.send(one_token(number))

    sent = threading.Thread(target=send, daemon=True)
    sent.start()
    sent.join(20)
    assert not sent.is_alive()
    assert read_tokens(front, 20_000) == list(range(20_000))
    # With the backlog gone, the next goes its straight way, once the sender has left.
    pipe.send(one_token(1))
    assert read_tokens(front, 1) == [1]
    pipe.close(1)
    front.close()


def test_what_waits_for_a_front_that_reads_again_is_merged(ends: Ends) -> None:
    front, engine = ends
    pipe = EnginePipe(engine)
    for number in range(20_000):
        pipe.send(one_token(number))
    num_messages, num_tokens = 0, 0
    while num_tokens < 20_000:
        num_messages += 1
        num_tokens += len(front.recv().token_ids)
    assert num_messages < 5000
    pipe.close(1)
    front.close()


def test_a_message_larger_than_the_pipe_is_sent_whole_and_in_its_turn(ends: Ends) -> None:
    front, engine = ends
    pipe = EnginePipe(engine)
    pipe.send(Fatal("x" * 3_000_000))
    pipe.send(Fatal("after"))
    assert len(front.recv().message) == 3_000_000
    assert front.recv() == Fatal("after")
    pipe.close(1)
    front.close()


def test_last_words_are_waited_for(ends: Ends) -> None:
    front, engine = ends
    pipe = EnginePipe(engine)
    pipe.send(Fatal("x" * 3_000_000))
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.append(front.recv()))
    closer = threading.Thread(target=pipe.close, args=(10,))
    closer.start()
    reader.start()
    closer.join(10)
    reader.join(10)
    assert not closer.is_alive()
    assert received == [Fatal("x" * 3_000_000)]
    front.close()


def test_a_front_that_never_reads_delays_the_end_by_the_limit_alone(ends: Ends) -> None:
    front, engine = ends
    pipe = EnginePipe(engine)
    pipe.send(Fatal("x" * 3_000_000))
    began = time.monotonic()
    pipe.close(0.05)
    assert 0.05 <= time.monotonic() - began < 5
    front.close()


def test_a_front_that_is_gone_is_an_error_even_with_a_backlog(ends: Ends) -> None:
    front, engine = ends
    pipe = EnginePipe(engine)
    pipe.send(Fatal("x" * 3_000_000))
    front.close()
    with pytest.raises(OSError):
        for _ in range(1_000_000):
            pipe.send(Fatal("nobody listens"))
    pipe.close(1)
