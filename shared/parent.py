"""A child process that must not outlive its parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent dies, however that happens.

    Strictly, when the thread dies that started this process. Exits with 0 when the parent
    is gone already. Only Linux has the call; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # It died before it could be asked for.
        sys.exit(0)
