"""A drive that a test drives by hand: its requests, its files, its time, and a tier's workers.

Nothing happens but in ``step``, on the test's thread. The bytes are in the page cache: no file is
opened for direct I/O or synced.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from kvhearth_server.tiers.ssd.disk.queues import (
    Op,
    Reaped,
    Request,
    make_event,
    reset_event,
    signal_event,
)
from kvhearth_server.tiers.ssd.files import Files, OpenFile
from kvhearth_server.tiers.ssd.tier import Environment
from support.scripted_clock import HandClock

PAGE = 4096
Page = tuple[int, int]
"""A page of a file: the file's inode and the page's number."""


def size_of(request: Request) -> int:
    """Return the bytes of all pieces."""
    return sum(size for _, size in request.pieces)


def pages_of(request: Request) -> set[Page]:
    """Return the pages that a request reads or writes."""
    first, inode = request.offset // PAGE, os.fstat(request.fd).st_ino
    return {(inode, page) for page in range(first, first + size_of(request) // PAGE)}


def is_below(request: Request, folder: Path) -> bool:
    """Whether a request is for a file of a folder."""
    return os.readlink(f"/proc/self/fd/{request.fd}").startswith(f"{folder}/")


class Hangs(Exception):
    """Raised by a hook: the call does not return for now, and is made again at a later step."""


def _good(request: Request) -> int:
    return size_of(request)


class HandQueue:
    """A disk queue whose requests end at ``end_some``, in order.

    Attributes:
        fate: bytes that a request moves, or a negative errno. What a failed or short read leaves
            in its memory is wrong.
        holds: requests that do not end for now.
        shut: takes no reads.
        broken: error of the queue itself.
        order: sorts the requests that end together.
        reads: all reads that were taken.
    """

    name = "drive"

    def __init__(self, depth: int) -> None:
        self.depth, self.event_fd = depth, make_event()
        self.reads: list[Request] = []
        self.waiting: list[Request] = []
        self._ended: list[Reaped] = []
        self.order: Callable[[list[Request]], list[Request]] = lambda requests: requests
        self.shut = False
        self.broken: OSError | None = None
        self.well()

    def well(self) -> None:
        """Let all requests end as they should."""
        self.fate: Callable[[Request], int] = _good
        self.release()

    def release(self) -> None:
        """Hold no request back."""
        self.holds: Callable[[Request], bool] = lambda _: False
        self.shut = False
        signal_event(self.event_fd)

    def fail(self, op: Op, error: int, folder: Path | None = None) -> None:
        """Fail all requests of an operation, of one folder if there is one."""
        self.fate = lambda each: (
            -error
            if each.op is op and (folder is None or is_below(each, folder))
            else size_of(each)
        )

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self._ended)

    def submit(self, requests: Sequence[Request]) -> int:
        if self.broken is not None:
            raise self.broken
        if self.shut and any(each.op is Op.READ for each in requests):
            return 0
        taken = requests[: self.depth - self.in_flight]
        self.waiting += taken
        self.reads += [each for each in taken if each.op is Op.READ]
        return len(taken)

    def end_some(self) -> bool:
        """End all requests that are not held; false if there is none."""
        ending = [each for each in self.waiting if not self.holds(each)]
        self.waiting = [each for each in self.waiting if each not in ending]
        for each in self.order(ending):
            try:
                result = self._move(each, self.fate(each))
            except OSError as error:
                result = -(error.errno or errno.EIO)
            self._ended.append(Reaped(each.tag, result))
            signal_event(self.event_fd)
        return bool(ending)

    def _move(self, request: Request, result: int) -> int:
        if request.op is Op.SYNC:
            return min(0, result)
        buffers = [(ctypes.c_char * size).from_address(at) for at, size in request.pieces]
        if request.op is Op.READ:
            found = os.preadv(request.fd, buffers, request.offset)
            if result != size_of(request):
                for at, size in request.pieces:
                    ctypes.memset(at, 0x5A, size)
            return min(result, found)
        if result <= 0:
            return result
        return os.pwrite(request.fd, b"".join(buffers)[:result], request.offset)

    def reap(self) -> list[Reaped]:
        reset_event(self.event_fd)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1


class HandFiles(Files):
    """Files of the page cache.

    Attributes:
        opens, makes, reads: called before a file is opened, before the blocks of one are reserved,
            and before a piece is read back; may raise ``OSError`` or ``Hangs``.
        direct: direct I/O is allowed, as the tier believes.
        read_only: no file can be written or made.
    """

    def __init__(self) -> None:
        self.opens: Callable[[Path], None] = lambda path: None
        self.makes: Callable[[], None] = lambda: None
        self.reads: Callable[[Path, int], None] = lambda path, offset: None
        self.direct, self.read_only = True, False

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        self.opens(path)
        return super().open(path, create=create)

    def open_raw(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        if flags & (os.O_RDWR | os.O_CREAT) and self.read_only:
            raise OSError(errno.EROFS, "a read-only file system")
        return super().open_raw(path, flags & ~os.O_DIRECT)

    def allocate(self, fd: int, size_bytes: int) -> int:
        self.makes()
        return super().allocate(fd, size_bytes)

    def read_into(self, fd: int, memory: memoryview, offset: int) -> int:
        self.reads(Path(os.readlink(f"/proc/self/fd/{fd}")), offset)
        return super().read_into(fd, memory, offset)

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


class HandWorker:
    """A worker that works in ``step``."""

    def __init__(self, drive: Drive, turn: Callable[[], bool], event_fd: int) -> None:
        self._drive, self._turn, self._event_fd = drive, turn, event_fd
        self._called = self._lives = True

    def wake(self) -> None:
        self._called = True

    @property
    def alive(self) -> bool:
        return self._lives

    def step(self) -> bool:
        """Take a turn if there is a reason to; false if there is none."""
        if not self._lives or not (self._called or self._signalled()):
            return False
        self._called = False
        try:
            self._lives = self._turn()
        except Hangs:
            self._called = True
            return False
        except RuntimeError:  # a bug that ends a thread
            self._lives = False
        return True

    def _signalled(self) -> bool:
        try:
            return self._event_fd >= 0 and os.eventfd_read(self._event_fd) > 0
        except BlockingIOError:
            return False

    def join(self, deadline_s: float) -> bool:
        moves = True
        while self._lives and moves:
            ends = self._event_fd >= 0 and self._drive.queue.end_some()
            moves = self.step() or ends
        return not self._lives


class Drive:
    """All drives of one tier."""

    def __init__(self, depth: int = 16) -> None:
        self.clock = HandClock()
        self.files = HandFiles()
        self._depth = depth
        self._workers: list[HandWorker] = []

    @cached_property
    def queue(self) -> HandQueue:
        """The queue, which its tier closes."""
        return HandQueue(self._depth)

    def environment(self) -> Environment:
        """Return the outside world of a tier on the drive."""
        return Environment(files=self.files, clock=self.clock, queue=self.queue, start=self.start)

    def start(self, name: str, turn: Callable[[], bool], event_fd: int) -> HandWorker:
        """Start a worker."""
        self._workers.append(made := HandWorker(self, turn, event_fd))
        return made

    def step(self) -> bool:
        """Do all that can be done at once; false if there was nothing to do."""
        if not self._workers:
            return False
        moved = [self.queue.end_some(), *(each.step() for each in self._workers)]
        return any(moved)
