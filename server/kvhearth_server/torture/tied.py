"""Processes of the kit end with it, whatever ended it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when the thread ends that started it;
    the kit starts processes on its main thread. ``parent`` is that thread's process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be said
        os.kill(os.getpid(), signal.SIGKILL)
