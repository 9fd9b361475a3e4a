"""The load of `tests.bench.stream`: one prepared request, many streams, a foreign client.

A client in Python would take longer for a message than the gateway does. h2load takes the
least; ghz decodes each message, and needs a core of its own.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

METHOD = "tandem.v1.InferenceService/GenerateStream"
_END_TIMEOUT_S = 5.0


class LoadError(Exception):
    """The load could not be made as it was wanted."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `total` requests, `streams` of them at a time, over some connections."""

    streams: int
    connections: int
    total: int


class Generator:
    """h2load or ghz, with the request in a file of theirs."""

    def __init__(self, program: str, request: bytes, folder: Path) -> None:
        """Raises LoadError when there is no such program; "auto" is the first that is there."""
        wanted = ("h2load", "ghz") if program == "auto" else (program,)
        found = [name for name in wanted if shutil.which(name)]
        if not found:
            raise LoadError(f"none of {', '.join(wanted)} is on the PATH")
        self.name = found[0]
        self._file = folder / "request.bin"
        # gRPC's own frame (not compressed, length) is ours to make for h2load.
        prefix = b"\0" + len(request).to_bytes(4) if self.name == "h2load" else b""
        self._file.write_bytes(prefix + request)
        self._output = folder / "load.txt"

    @contextmanager
    def running(self, address: str, load: Load) -> Iterator["RunningLoad"]:
        """The load, ended by force where the block ends before it does."""
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                self._command(address, load),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the bench, which ends it.
                process_group=0,
            )
        try:
            yield RunningLoad(process, self._output)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(_END_TIMEOUT_S)

    def _command(self, address: str, load: Load) -> Sequence[str]:
        connections = min(load.connections, load.streams)
        if self.name == "ghz":
            return [
                *("ghz", "--insecure", "--call", METHOD, "--binary-file", str(self._file)),
                *("--concurrency", str(load.streams), "--total", str(load.total)),
                *("--connections", str(connections), "--timeout", "0", address),
            ]
        streams_each = -(-load.streams // connections)
        return [
            *("h2load", f"--clients={connections}", f"--max-concurrent-streams={streams_each}"),
            *(f"--requests={load.total}", f"--threads={min(4, _spare_cores())}"),
            *("--header=content-type: application/grpc", "--header=te: trailers"),
            *(f"--data={self._file}", f"http://{address}/{METHOD}"),
        ]


@dataclass(frozen=True, slots=True)
class RunningLoad:
    """The program at work."""

    process: "subprocess.Popen[bytes]"
    output: Path

    def require_alive(self) -> None:
        """Raises LoadError with its last words when it has ended."""
        if self.process.poll() is not None:
            raise LoadError(f"the load ended early:\n{self.tail()}")

    def wait_end(self, timeout_s: float) -> float:
        """Seconds until it ended by itself. Raises LoadError."""
        began = time.monotonic()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LoadError(f"the load took longer than {timeout_s:g} s:\n{self.tail()}") from None
        if code:
            raise LoadError(f"the load ended with {code}:\n{self.tail()}")
        return time.monotonic() - began

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-2000:]


def _spare_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) // 4)
