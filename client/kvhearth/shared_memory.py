"""Mappings of shared files at the borders of huge pages, and their collapse into huge pages.

``MADV_COLLAPSE`` (Linux 6.1) makes huge pages of the pages that a range of a memfd or tmpfs has,
whatever ``shmem_enabled`` says (except ``deny``). Once one process has done so, every other one
maps each by a single page fault, provided that its mapping begins at such a border.

The mapping is made with the system call and not with ``mmap.mmap``, which keeps a duplicate of the
descriptor: a forked child would inherit it, and with it the lock by which the daemon sees that a
client may still write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Call ``madvise`` without the interpreter lock, which ``mmap.madvise`` would hold. Return the
    error's number, 0 for none.
    """
    return ctypes.get_errno() if _madvise(address, size_bytes, advice) else 0


def populate(
    address: int,
    size_bytes: int,
    page_bytes: int,
    advise: Callable[[int, int, int], int] = advise,
) -> int:
    """Have the kernel populate the pages of a range of a shared mapping; contents do not change.

    Args:
        address, size_bytes: the range, widened to whole pages.
        page_bytes: size of the pages.
        advise: the system call, as ``advise``.

    Returns:
        The error's number where touching a page would be a SIGBUS; 0 for none, and before
        Linux 5.14, which cannot tell.
    """
    begin = address - address % page_bytes
    end = address + size_bytes
    end += -end % page_bytes
    while (number := advise(begin, end - begin, MADV_POPULATE_WRITE)) == errno.EINTR:
        pass
    return 0 if number == errno.EINVAL else number


class SharedMapping:
    """One shared mapping of a file, unmapped when the last array made of it is gone: no view
    outlives its memory.

    Args:
        descriptor: the file, at least ``size_bytes`` long; it may be closed afterwards.
        size_bytes: bytes to map from its start.
        align_bytes: the address is a multiple of it; a power of two.
        writable: whether this process may write to it.

    Raises:
        OSError: the kernel refuses; ENOMEM if too few hugetlb pages are free.
    """

    def __init__(
        self, descriptor: int, size_bytes: int, align_bytes: int = 1, *, writable: bool = True
    ) -> None:
        self.address = 0
        self.size_bytes = size_bytes
        self._writable = writable
        self._pid = os.getpid()
        # Never with MAP_NORESERVE: too few huge pages would then be a SIGBUS at first touch.
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if align_bytes <= os.fstatvfs(descriptor).f_bsize:  # also hugetlbfs, which aligns by itself
            self.address = _map(None, size_bytes, access, mmap.MAP_SHARED, descriptor)
            return
        whole_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        empty = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _map(None, whole_bytes + align_bytes, 0, empty, -1)
        address = -(-start // align_bytes) * align_bytes
        # If this fails, the reserved addresses stay: the kernel may have freed some of them, and
        # another thread may have mapped something there.
        map_over(address, size_bytes, descriptor, access=access)
        self.address = address
        if address > start:
            _munmap(start, address - start)
        _munmap(address + whole_bytes, start + align_bytes - address)

    def advise(self, advice: int) -> int:
        """Advise the kernel on all of it; return the error's number, 0 for none."""
        return advise(self.address, self.size_bytes, advice)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, not self._writable),
        }

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        # A forked child has nothing there, or something of its own.
        if self.address and os.getpid() == self._pid:
            munmap(self.address, self.size_bytes)


def map_over(
    address: int,
    size_bytes: int,
    descriptor: int,
    start: int = 0,
    *,
    access: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> None:
    """Replace whole pages of a mapping by those of a file from ``start`` on, shared.

    Raises:
        OSError: the kernel refuses.
    """
    _map(address, size_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, start)


def _map(
    at: int | None, size_bytes: int, access: int, flags: int, descriptor: int, start: int = 0
) -> int:
    address = _mmap(at, size_bytes, access, flags, descriptor, start)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


_ATTEMPTS = 3
_PAUSE_S = 0.002
_REFUSALS_MAX = 3


class Collapse:
    """Collapses ranges of a shared mapping until the kernel has refused too many of them.

    Contents do not change, also beside other processes that read and write them. The kernel skips
    huge pages that are there already.

    Args:
        huge_bytes: size of a huge page; ranges begin and end at its borders.
        advise: the system call, as ``advise``.

    Attributes:
        error: number of the last error, 0 for none.
    """

    def __init__(self, huge_bytes: int, advise: Callable[[int, int, int], int] = advise) -> None:
        self.error = 0
        self._huge_bytes = huge_bytes
        self._advise = advise
        self._collapsed = self._refusals = 0

    @property
    def refused(self) -> bool:
        """Whether the kernel is not asked any more."""
        return self._refusals >= _REFUSALS_MAX

    def fill(self, address: int, size_bytes: int) -> bool:
        """Collapse a range that may have no pages yet; see ``collapse``.

        Raises:
            OSError: there is no memory for a page.
        """
        if self.refused:
            return False
        # The kernel refuses an empty huge page, so one small page of each is taken first. It is
        # read: that is safe beside other processes. The call returns an error where a plain read
        # would be a SIGBUS.
        for each in range(address, address + size_bytes, self._huge_bytes):
            number = self._advise(each, mmap.PAGESIZE, MADV_POPULATE_READ)
            if number not in (0, errno.EINVAL):
                raise OSError(number, os.strerror(number))
        return self.collapse(address, size_bytes)

    def collapse(self, address: int, size_bytes: int) -> bool:
        """Collapse a range; return whether all of it is in huge pages now."""
        if self.refused:
            return False
        for attempt in range(_ATTEMPTS):
            number = self._advise(address, size_bytes, MADV_COLLAPSE)
            if not number:
                self._collapsed += 1
                return True
            self.error = number
            if number not in (errno.EAGAIN, errno.EINTR):
                break
            time.sleep(_PAUSE_S * (attempt + 1))  # pages are in use for a moment
        unknown = number == errno.EINVAL and not self._collapsed
        self._refusals += _REFUSALS_MAX if unknown else 1
        return False
