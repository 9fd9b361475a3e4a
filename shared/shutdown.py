"""SIGTERM and SIGINT as an event on the running loop."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def shutdown_event(*, second_kills: bool = True) -> Iterator[asyncio.Event]:
    """An event that the first signal sets; a second one kills the process at once.

    Without `second_kills` later signals say nothing new: for a process that its parent
    stops, while a service manager may signal the two of them.

    Must be entered on the main thread, inside the loop. The signals' former handling
    comes back on exit.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    event = asyncio.Event()

    def on_signal() -> None:
        event.set()
        if not second_kills:
            return
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield event
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
