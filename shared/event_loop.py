"""The event loop of the services: uvloop, woken once for many of gRPC's events.

gRPC's own thread writes a byte to a socket for each event, and the loop's callback takes
one byte and then every event that is there. Of 256 writes that end together, 255 bytes are
left, and the loop turns once for each of them with nothing to do, which takes two system calls.
Here the others are taken along with the first.
"""

import array
import fcntl
import socket
import termios
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop


class EventLoop(uvloop.Loop):
    """uvloop's loop, but for the reader that gRPC adds; any other is left alone."""

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        if isinstance(fd, socket.socket) and is_grpcs_reader(callback):
            callback = partial(_read_once, fd, callback)
        super().add_reader(fd, callback, *args)


def new_event_loop() -> EventLoop:
    return EventLoop()


def is_grpcs_reader(callback: Callable[..., Any]) -> bool:
    """By the name of gRPC's queue: whatever has another is read as it would be without this."""
    handler = callback.func if isinstance(callback, partial) else callback
    return type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue"


def _read_once(wakes: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """One byte is left for the callback. What comes from here on has a byte of its own."""
    waiting = array.array("i", [0])
    fcntl.ioctl(wakes, termios.FIONREAD, waiting)
    if waiting[0] > 1:
        wakes.recv(waiting[0] - 1)
    callback(*args)
