"""The door to the system calls that Python has no function for."""

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
"""io_setup, io_destroy, io_getevents, io_submit, as each platform numbers them."""

# A CDLL gives the interpreter lock away for the time of each call.
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# A PyDLL keeps it. What never waits is called so: while another thread is busy, to get the lock
# back takes the switch interval, each time.
_quick = ctypes.PyDLL(None, use_errno=True)
_eventfd_read, _eventfd_write = _quick.eventfd_read, _quick.eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_COUNT = ctypes.c_uint64()
_COUNT_AT = ctypes.byref(_COUNT)
"""Nobody looks at it: threads may share it."""


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


def reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve the blocks of a file. Not ``posix_fallocate``: where the file system cannot, glibc's
    writes a byte of each block, unless the file is open with O_DIRECT, and nobody is told.

    Raises:
        OSError: what the kernel answered.
    """
    while _libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def aio_numbers() -> tuple[int, int, int, int]:
    """Numbers of io_setup, io_destroy, io_getevents and io_submit.

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
    """A descriptor to signal with, not blocking."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def signal_event(descriptor: int) -> None:
    """Make ``descriptor`` readable.

    Raises:
        OSError: it is no such descriptor.
    """
    if _eventfd_write(descriptor, 1) < 0:
        _check_event()  # its counter is full: it is readable


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
