"""Starts a module in this process's place, or as a child that cannot outlive it.

`python -m gateway.cli.child PARENT_PID MODULE ARGUMENT...` asks the kernel for SIGTERM at
the parent's death, then becomes `python -m MODULE ARGUMENT...`. Done here, before exec,
because a hook between fork and exec is unsafe in a parent that has gRPC's threads.
Only Linux has the call; elsewhere the module is started without it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter.

    -P keeps the current folder off the path: `worker` and `shared` are names that a
    user's own folders may have.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Goes on as this module, with this process's id."""
    command = python_command(module, *arguments)
    os.execv(command[0], command)


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a child of this process."""
    return python_command("gateway.cli.child", str(os.getpid()), module, *arguments)


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have died before the kernel knew that we mind.
    if os.getppid() != int(parent):
        sys.exit(f"the process {parent} that started {module} is gone")
    become(module, arguments)


if __name__ == "__main__":
    main()
