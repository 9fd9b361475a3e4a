"""The loop's end of the pipe: waits for commands, and no longer than it is told."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from worker.messages import Stop
from worker.wakeable_channel import WakeableChannel

LONG_S = 20.0
AT_ONCE_S = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[Connection, WakeableChannel]]:
    ours, theirs = multiprocessing.Pipe()
    channel = WakeableChannel(theirs)
    yield ours, channel
    channel.close()
    theirs.close()
    ours.close()


Ends = tuple[Connection, WakeableChannel]


def test_a_command_ends_the_wait(ends: Ends) -> None:
    pipe, channel = ends
    pipe.send(Stop())
    assert channel.poll(LONG_S)
    assert channel.recv() == Stop()
    assert not channel.poll(0)


def test_a_wake_from_another_thread_ends_the_wait_without_a_command(ends: Ends) -> None:
    _, channel = ends
    thread = threading.Thread(target=channel.wake)
    began_at = time.monotonic()
    thread.start()
    assert not channel.poll(LONG_S)
    assert time.monotonic() - began_at < AT_ONCE_S
    thread.join()


def test_a_wake_before_the_wait_is_not_lost_and_ends_one_wait_alone(ends: Ends) -> None:
    _, channel = ends
    for _ in range(3):
        channel.wake()
    began_at = time.monotonic()
    assert not channel.poll(LONG_S)
    assert time.monotonic() - began_at < AT_ONCE_S
    assert not channel.poll(0.05)
    assert time.monotonic() - began_at >= 0.05


def test_more_wakes_than_a_pipe_holds_do_not_block(ends: Ends) -> None:
    _, channel = ends
    for _ in range(100_000):
        channel.wake()
    assert not channel.poll(LONG_S)


def test_a_command_is_seen_beside_a_wake(ends: Ends) -> None:
    pipe, channel = ends
    channel.wake()
    assert not channel.poll(0)
    pipe.send(Stop())
    assert channel.poll(0)
    assert channel.poll(LONG_S)


def test_the_other_ends_loss_ends_the_wait(ends: Ends) -> None:
    pipe, channel = ends
    pipe.close()
    assert channel.poll(LONG_S)
    assert channel.poll(0)
    with pytest.raises(EOFError):
        channel.recv()


def test_a_wake_after_the_end_does_nothing() -> None:
    ours, theirs = multiprocessing.Pipe()
    channel = WakeableChannel(theirs)
    channel.close()
    # It gets the numbers of the pipe that was closed.
    receiver, sender = multiprocessing.Pipe(duplex=False)
    channel.wake()
    assert not receiver.poll(0)
    for end in (receiver, sender, theirs, ours):
        end.close()
