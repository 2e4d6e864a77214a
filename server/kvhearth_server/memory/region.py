"""One mapped region of shared memory, and the locks by which its clients are counted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.mapping import address_of
from kvhearth_server.memory.pages import PageKind

# Linux's numbers; the standard library's fcntl lacks the names.
_F_OFD_GETLK = 36
_F_OFD_SETLK = 37
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux


class Segment:
    """One region of memory that daemon and clients map, wholly populated.

    Attributes:
        bytes: its size.
        page_bytes: the size of its pages.
        page_kind: what those pages are.
        path: its file, or None for a memfd.
        fd: the daemon's own descriptor. Never pass it to a client: see ``lock_client_byte``.
        view: the bytes, ``u8`` of shape (bytes,), writable.
        address: where ``view`` begins in this process.
        steps_down: for each better kind of page that could not be had, a sentence with the fix.
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
        """A new open file description of the same memory, read-write; the caller closes it."""
        # Through /proc also for files: a path may by now name another file, or none.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def lock_client_byte(self, index: int) -> int:
        """A new description that holds an OFD write lock on byte ``index``; its descriptor.

        Pass it to the client and close it: the lock then lasts as long as the client has the
        descriptor or maps the memory through it, and ends with neither close, fork nor kill -9
        of one of several holders.

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
        """Whether any process still holds or maps what ``lock_client_byte(index)`` gave out."""
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
        """Give the surplus back. Whoever still maps that part gets a SIGBUS when it touches it."""
        os.ftruncate(self.fd, self.bytes)

    def close(self) -> None:
        """Unmap and close; a file stays. Closing twice does nothing.

        While someone else keeps an array over ``view``, the mapping lives on until that is gone.
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
