"""Mapping of shared memory files, and faulting in all of their pages without a risk of SIGBUS."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.page_kinds import MIB, PageKind

Progress = Callable[[int, int], None]
"""Callback with (done bytes, total bytes)."""

POPULATE_STEP_BYTES = 256 * MIB
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@contextlib.contextmanager
def closed_on_failure(descriptor: int) -> Iterator[contextlib.ExitStack]:
    """Close ``descriptor`` unless the block succeeds; further undo callbacks may be added."""
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        yield undo
        undo.pop_all()


def map_shared(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map the whole file read-write and shared; this reserves hugetlb pages. A core dump leaves the
    mapping out, as far as the kernel allows it.

    Raises:
        OSError: ENOMEM if there are too few huge pages.
    """
    # Never with MAP_NORESERVE: too few huge pages would then be a SIGBUS at first touch.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, access)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def address_of(mapping: mmap.mmap) -> int:
    """Start address of the mapping in this process."""
    return int(np.frombuffer(mapping, np.uint8, count=1).ctypes.data)


def advise_huge(mapping: mmap.mmap) -> None:
    """Request transparent huge pages; a refusal by an old kernel or a container is no error."""
    _libc.madvise(address_of(mapping), len(mapping), _MADV_HUGEPAGE)


def populate(
    mapping: mmap.mmap,
    page_bytes: int,
    on_progress: Progress | None = None,
    allocate_fd: int | None = None,
) -> None:
    """Fault in the whole mapping, in pieces; contents do not change.

    Args:
        mapping: all of a file.
        page_bytes: the size of its pages.
        on_progress: called after each piece.
        allocate_fd: the file, if its pages are to be allocated through ``fallocate`` first.

    Raises:
        OSError: ENOSPC, ENOMEM or EFAULT if a page is unavailable (an error, not a SIGBUS).
    """
    total = len(mapping)
    address = address_of(mapping)
    done = 0
    while done < total:
        size = min(POPULATE_STEP_BYTES, total - done)
        if allocate_fd is not None:
            os.posix_fallocate(allocate_fd, done, size)
        # Through ctypes, because mmap.madvise holds the interpreter lock for the whole piece.
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


# Linux's numbers; the standard library's fcntl lacks the names.
_F_OFD_GETLK = 36
_F_OFD_SETLK = 37
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux


class Segment:
    """One fully populated region of memory that daemon and clients map.

    Attributes:
        bytes: its size.
        page_bytes: the size of its pages.
        page_kind: the kind of its pages.
        path: its file, or None for a memfd.
        fd: the daemon's own descriptor. Never pass it to a client: see ``lock_client_byte``.
        view: the bytes, ``u8`` of shape (bytes,), writable.
        address: start of ``view`` in this process.
        steps_down: for each better kind of page that was unavailable, a sentence with the fix.
    """

    def __init__(
        self,
        fd: int,
        mapping: mmap.mmap,
        page_kind: PageKind,
        page_bytes: int,
        *,
        path: Path | None = None,
        steps_down: list[str] | None = None,
    ) -> None:
        self.fd = fd
        self.bytes = len(mapping)
        self.page_kind = page_kind
        self.page_bytes = page_bytes
        self.path = path
        self.steps_down = steps_down if steps_down is not None else []
        self.address = address_of(mapping)
        self.view: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self._mapping = mapping

    def reopen(self) -> int:
        """Open a new file description of the same memory, read-write; the caller closes it."""
        # Through /proc even for files: by now the path may name another file, or none.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def lock_client_byte(self, index: int) -> int:
        """Open a description with an OFD write lock on byte ``index``; returns its descriptor.

        Pass it to the client and close it. The lock then lasts while the client has the descriptor
        or maps the memory through it, and is not ended by close, fork or kill -9 of one of several
        holders.

        Raises:
            KVHearthError: ``ARENA_BUSY`` if an earlier client still holds that byte.
        """
        descriptor = self.reopen()
        try:
            fcntl.fcntl(descriptor, _F_OFD_SETLK, _byte_lock(index))
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise KVHearthError(
                Reason.ARENA_BUSY,
                f"client byte {index} is still held by an earlier client; take another index",
            ) from None
        return descriptor

    def client_byte_held(self, index: int) -> bool:
        """Whether any process still holds or maps the result of ``lock_client_byte(index)``."""
        answer = fcntl.fcntl(self.fd, _F_OFD_GETLK, _byte_lock(index))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def held_bytes(self) -> list[int]:
        """The client bytes that any process still holds or maps, ascending."""
        found: list[int] = []
        while True:
            start = found[-1] + 1 if found else 0
            # A length of zero stands for everything from ``start`` on.
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 0, 0)
            kind, _, first, _, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, _F_OFD_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return found
            found.append(max(first, start))

    @property
    def surplus_bytes(self) -> int:
        """Bytes of the file beyond the mapping, left over from a larger arena."""
        return os.fstat(self.fd).st_size - self.bytes

    def trim(self) -> None:
        """Free the surplus; a process that still maps that part gets a SIGBUS on touching it."""
        os.ftruncate(self.fd, self.bytes)

    def close(self) -> None:
        """Unmap and close; a file stays. Closing twice does nothing.

        While another holder keeps an array over ``view``, the mapping lives until that array is
        gone.
        """
        if self.fd < 0:
            return
        self.view = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self.fd)
        self.fd = -1


def _byte_lock(index: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
