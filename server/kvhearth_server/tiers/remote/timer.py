"""A timer as a descriptor, which an event loop can watch (Python has one from 3.13)."""

from __future__ import annotations

import ctypes
import os
import time

_libc = ctypes.CDLL(None, use_errno=True)
_MONOTONIC = 1
_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns"))


class Timer:
    """A timer of ``CLOCK_MONOTONIC``, the clock of ``time.monotonic``.

    Attributes:
        fd: readable once the set moment has passed.
    """

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(_MONOTONIC, _FLAGS)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._at: float | None = None

    def set(self, at: float | None) -> None:
        """Make ``fd`` readable at a moment; never for None."""
        if at == self._at:
            return
        self._at = at
        nanoseconds = 0 if at is None else max(int(max(at, time.monotonic()) * 1e9), 1)
        spec = _Spec(0, 0, *divmod(nanoseconds, 1_000_000_000))
        _libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)
