"""Signals that end a command in order."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like an exception, so that nothing is left behind.

    The exit status is 128 more than the signal. Main thread only.
    """

    def ended(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:  # a second one must not interrupt the cleanup
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
