"""Processes of the kit end with it, whatever ended it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def end_with(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when the thread ends that started it;
    the kit starts processes on its main thread. ``parent`` is that thread's process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be said
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception does, so that nothing is left behind; the
    exit status is 128 more than the signal. Main thread only.
    """

    def ended(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:  # a second one must not end the cleaning
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(each, ended)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
