"""System calls for which Python has no function."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence

from kvhearth_server.tiers.ssd.disk.base import PIECES_MAX

IO_URING_SETUP = 425
IO_URING_ENTER = 426
IO_URING_REGISTER = 427

_AIO_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents, io_submit on each platform."""

# A CDLL releases the interpreter lock during each call.
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# A PyDLL keeps the lock, which suits calls that never wait: while another thread is busy, getting
# the lock back takes the switch interval, each time.
_quick = ctypes.PyDLL(None, use_errno=True)
_eventfd_read, _eventfd_write = _quick.eventfd_read, _quick.eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_COUNT = ctypes.c_uint64()
_COUNT_AT = ctypes.byref(_COUNT)
"""Unused result: threads may share it."""


def system_call(number: int, *arguments: int) -> int:
    """Make a system call; arguments are numbers and addresses.

    Raises:
        OSError: the kernel's error.
    """
    result = int(_syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve the blocks of a file. ``posix_fallocate`` is not used: where the file system cannot
    reserve, glibc silently writes a byte of each block, unless the file is open with O_DIRECT.

    Raises:
        OSError: the kernel's error.
    """
    while _libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def aio_numbers() -> tuple[int, int, int, int]:
    """Return the numbers of io_setup, io_destroy, io_getevents and io_submit.

    Raises:
        OSError: ENOSYS on a platform whose numbers are not known here.
    """
    machine = platform.machine()
    if machine not in _AIO_NUMBERS:
        raise OSError(errno.ENOSYS, f"libaio's system calls are not known on {machine}")
    return _AIO_NUMBERS[machine]


def put_vectors(
    vectors: ctypes.Array[ctypes.c_uint64], slot: int, pieces: Sequence[tuple[int, int]]
) -> None:
    """Write the (address, bytes) of a request's pieces as its ``iovec`` array.

    ``vectors`` has room for ``PIECES_MAX`` of them for each slot, two 64-bit numbers each.
    """
    at = slot * PIECES_MAX * 2
    for address, length in pieces:
        vectors[at] = address
        vectors[at + 1] = length
        at += 2


def make_event() -> int:
    """Return a non-blocking descriptor to signal with."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def signal_event(descriptor: int) -> None:
    """Make ``descriptor`` readable.

    Raises:
        OSError: it is no such descriptor.
    """
    if _eventfd_write(descriptor, 1) < 0:
        _check_event()  # its counter is full, so it is readable


def reset_event(descriptor: int) -> None:
    """Make ``descriptor`` unreadable until the next signal.

    Raises:
        OSError: it is no such descriptor.
    """
    if _eventfd_read(descriptor, _COUNT_AT) < 0:
        _check_event()


def _check_event() -> None:
    code = ctypes.get_errno()
    if code != errno.EAGAIN:
        raise OSError(code, os.strerror(code))
