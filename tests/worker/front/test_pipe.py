"""The loop's end of the pipe speaks the framing of multiprocessing's Connection."""

import asyncio
import multiprocessing
import pickle
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.pipe import FrameDecoder, FrontPipe

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
