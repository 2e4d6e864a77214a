"""Mapping a file of shared memory and faulting all of it in, without ever risking SIGBUS."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np

from kvhearth_server.memory.pages import MIB

Progress = Callable[[int, int], None]
"""Called with (done bytes, total bytes)."""

POPULATE_STEP_BYTES = 256 * MIB
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@contextlib.contextmanager
def closed_on_failure(descriptor: int) -> Iterator[contextlib.ExitStack]:
    """Close ``descriptor`` unless the block ends well; further undoing may be added."""
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        yield undo
        undo.pop_all()


def map_shared(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map the whole file read-write and shared; hugetlb pages are reserved by this.

    Raises:
        OSError: ENOMEM if there are too few huge pages.
    """
    # Never with MAP_NORESERVE: too few huge pages would then be a SIGBUS at first touch.
    return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def address_of(mapping: mmap.mmap) -> int:
    """Where the mapping begins in this process."""
    return int(np.frombuffer(mapping, np.uint8, count=1).ctypes.data)


def advise_huge(mapping: mmap.mmap) -> None:
    """Ask for transparent huge pages; an old kernel's or container's refusal is no error."""
    _libc.madvise(address_of(mapping), len(mapping), _MADV_HUGEPAGE)


def populate(
    mapping: mmap.mmap,
    page_bytes: int,
    on_progress: Progress | None = None,
    allocate_fd: int | None = None,
) -> None:
    """Fault the whole mapping in, in pieces; contents do not change.

    Args:
        mapping: all of a file.
        page_bytes: the size of its pages.
        on_progress: called after each piece.
        allocate_fd: the file, if its pages are to be allocated through ``fallocate`` first.

    Raises:
        OSError: ENOSPC, ENOMEM or EFAULT if a page cannot be had (an answer, not a SIGBUS).
    """
    total = len(mapping)
    address = address_of(mapping)
    done = 0
    while done < total:
        size = min(POPULATE_STEP_BYTES, total - done)
        if allocate_fd is not None:
            os.posix_fallocate(allocate_fd, done, size)
        # Through ctypes, because mmap.madvise keeps the interpreter lock for all of the piece.
        if _libc.madvise(address + done, size, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            # Before Linux 5.14. Reading is enough, and it is safe beside other processes.
            np.frombuffer(mapping, np.uint8, size, done)[::page_bytes].max()
        done += size
        if on_progress is not None:
            on_progress(done, total)
