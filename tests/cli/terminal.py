"""Runs `tandem` as a process and reads what it writes."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended."""

    code: int
    out: str
    err: str


class Terminal:
    """A `tandem` process; stdin, stdout and stderr are pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *arguments: str, **environment: str) -> "Terminal":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.cli",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **environment},
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def read(self, text: str) -> str:
        """Reads stdout until it ends with `text`; fails when it closes before."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readuntil(text.encode())).decode()

    async def read_err(self, text: str) -> str:
        """Reads stderr until it ends with `text`; fails when it closes before."""
        assert self._process.stderr is not None
        return (await self._process.stderr.readuntil(text.encode())).decode()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()

    async def end(self, stdin: bytes = b"") -> Run:
        """Writes what is left to say, closes stdin and waits for the exit."""
        out, err = await self._process.communicate(stdin)
        assert self._process.returncode is not None
        return Run(self._process.returncode, out.decode(), err.decode())


async def tandem(*arguments: str, stdin: bytes = b"") -> Run:
    """One run from start to end."""
    return await (await Terminal.start(*arguments)).end(stdin)
