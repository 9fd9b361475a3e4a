"""SIGHUP as the wish that files be read again."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def hang_ups(on_signal: Callable[[], None]) -> Iterator[None]:
    """Calls it, on the loop, for each SIGHUP; without this the signal ends the process.

    Must be entered on the main thread, inside the loop. The former handling comes back on exit.
    """
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before or signal.SIG_DFL)
