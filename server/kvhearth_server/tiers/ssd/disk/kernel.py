"""The door to the system calls that Python has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform

IO_URING_SETUP = 425
IO_URING_ENTER = 426
IO_URING_REGISTER = 427

_AIO_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""io_setup, io_destroy, io_getevents, io_submit, as each platform numbers them."""

# A CDLL gives the interpreter lock away for the time of each call.
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def system_call(number: int, *arguments: int) -> int:
    """Make a system call; arguments are numbers and addresses.

    Raises:
        OSError: what the kernel answered.
    """
    result = int(_syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def aio_numbers() -> tuple[int, int, int, int]:
    """Numbers of io_setup, io_destroy, io_getevents and io_submit.

    Raises:
        OSError: ENOSYS on a platform whose numbers are not known here.
    """
    machine = platform.machine()
    if machine not in _AIO_NUMBERS:
        raise OSError(errno.ENOSYS, f"libaio's system calls are not known on {machine}")
    return _AIO_NUMBERS[machine]


def make_event() -> int:
    """A descriptor to signal with, not blocking."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def signal_event(descriptor: int) -> None:
    """Make ``descriptor`` readable."""
    with contextlib.suppress(BlockingIOError):  # its counter is full: it is readable
        os.eventfd_write(descriptor, 1)


def reset_event(descriptor: int) -> None:
    """Make ``descriptor`` unreadable until the next signal."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(descriptor)
