"""Threads beside the event loop's wait for their turn."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.scheduling import batch_other_threads, batch_this_thread

if sys.platform != "linux":
    pytest.skip("only Linux has the scheduling class", allow_module_level=True)


@contextmanager
def running_thread() -> Iterator[int]:
    """Its id, for as long as the block lasts."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        end.set()
        thread.join()


def test_every_thread_but_the_main_one_is_put_in_the_class() -> None:
    with running_thread() as first, running_thread() as second:
        assert os.sched_getscheduler(first) == os.SCHED_OTHER
        batch_other_threads()
        policies = [os.sched_getscheduler(thread) for thread in (first, second, os.getpid())]
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER]


def test_what_a_thread_of_the_class_starts_inherits_it() -> None:
    policies = []

    def start_another() -> None:
        batch_this_thread()
        with running_thread() as inner:
            policies.append(os.sched_getscheduler(inner))

    thread = threading.Thread(target=start_another)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_BATCH]
