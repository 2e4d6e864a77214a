"""File system operations of the SSD tier: opening, locking, allocating, measuring.

All of them may wait for the disk, so none is called on the loop once the tier runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.ownership import check_own, sync_directory
from kvhearth_server.tiers.base import FOREIGN_NAMES
from kvhearth_server.tiers.ssd.disk.queues import reserve
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

_ZEROS_BYTES = 4 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_WRITE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass
class OpenFile:
    """A locked file. ``direct``: opened with O_DIRECT; ``writable``: opened for writing too."""

    fd: int
    direct: bool
    writable: bool


class Busy(Exception):
    """Another open file description holds the lock: a daemon's, or requests' of a dead one."""


def _locked(path: Path, found: OpenFile) -> OpenFile:
    try:
        fcntl.flock(found.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(found.fd)
        raise Busy(str(path)) from None
    return found


class Files:
    """The real file system; tests substitute one that refuses operations.

    Attributes:
        steps: changes with each piece of a file that was read back or prewritten.
    """

    steps = 0

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        """Open and lock a file, with O_DIRECT if the file system allows it.

        The lock belongs to the open file description that requests will use: the kernel keeps it
        until the last of them has ended, even after this process was killed.

        Raises:
            Busy: it is locked already.
            OSError: it cannot be opened, or another user could read or write it.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        file = self._open(path, flags)
        try:
            check_own(file.fd, path)
        except OSError:
            os.close(file.fd)
            raise
        return _locked(path, file)

    def lock_directory(self, path: Path) -> OpenFile:
        """Lock a directory itself, where no file can be made in it.

        Raises:
            Busy, OSError: as ``open``.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return _locked(path, OpenFile(fd, True, False))

    def _open(self, path: Path, flags: int) -> OpenFile:
        error: OSError | None = None
        for direct in (True, False):
            for writable in (True, False):
                mode = os.O_RDWR if writable else os.O_RDONLY
                try:
                    fd = self.open_raw(path, flags | mode | (os.O_DIRECT if direct else 0))
                    return OpenFile(fd, direct, writable)
                except OSError as caught:
                    error = caught
                    if caught.errno in _NO_DIRECT and direct:
                        # The refused attempt may have created the file.
                        flags &= ~os.O_EXCL
                        break
                    if caught.errno not in _NO_WRITE or flags & os.O_CREAT:
                        raise
        raise error or OSError(errno.EIO, "cannot be opened", str(path))

    def open_raw(self, path: Path, flags: int) -> int:
        """Call ``os.open``."""
        return os.open(path, flags, 0o600)

    def allocate(self, fd: int, size_bytes: int) -> int:
        """Reserve the blocks of a file, so that no later write can run out of space. Return the
        bytes that had to be written for it, 0 where the file system can reserve.

        Raises:
            OSError: ENOSPC, EIO and the like.
        """
        try:
            reserve(fd, size_bytes)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self.write_zeros(fd, size_bytes)
            return size_bytes
        return 0

    def write_zeros(self, fd: int, size_bytes: int) -> None:
        """Write zeros from the beginning of a file to ``size_bytes``."""
        with mmap.mmap(-1, _ZEROS_BYTES) as zeros:
            done = 0
            while done < size_bytes:
                with memoryview(zeros)[: min(_ZEROS_BYTES, size_bytes - done)] as piece:
                    written = os.pwrite(fd, piece, done)
                if written <= 0 or written % PAGE_BYTES:
                    raise OSError(errno.EIO, "a short write")
                done += written
                self.steps += 1

    def allocated_bytes(self, path: Path) -> int:
        """Return the bytes that a directory and its files take by the file system's own count,
        except those that are not the tier's.
        """
        total = path.stat().st_blocks * 512
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name in FOREIGN_NAMES:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def read_page(self, fd: int, offset: int) -> bytes:
        """Read one page, aligned for direct I/O; shorter at the end of the file."""
        with mmap.mmap(-1, PAGE_BYTES) as page:
            count = os.preadv(fd, [page], offset)
            return page[:count]

    def read_into(self, fd: int, memory: memoryview, offset: int) -> int:
        """Read aligned bytes into aligned memory. Return how many, fewer at the end of the file.

        Raises:
            OSError: the device failed.
        """
        count = os.preadv(fd, [memory], offset)
        self.steps += 1
        return count

    def write_page(self, fd: int, offset: int, content: bytes) -> None:
        """Write one page and flush it.

        Raises:
            OSError: the write failed or was short.
        """
        with mmap.mmap(-1, PAGE_BYTES) as page:
            page[: len(content)] = content
            if os.pwritev(fd, [page], offset) != PAGE_BYTES:
                raise OSError(errno.EIO, "a short write")
        self.sync(fd)

    def sync(self, fd: int) -> None:
        """Flush a file's data."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        sync_directory(path)
