"""Disk queues: one protocol, and the kernel's interfaces behind it: libaio, threads."""

from __future__ import annotations

import ctypes
import enum
import errno
import itertools
import os
import platform
import queue
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

PIECES_MAX = 64
"""Most pieces of memory that one request gathers or scatters."""


class Op(enum.IntEnum):
    """Operation on a file."""

    READ = 0
    WRITE = 1
    SYNC = 2


class Request(NamedTuple):
    """One disk request.

    Attributes:
        op: ``SYNC`` flushes the file's data (as ``fdatasync``) and has no pieces.
        fd: an open file.
        offset: start of the request in the file, bytes.
        pieces: (address, bytes) of the memory, in file order; at most ``PIECES_MAX``.
        tag: the caller's number of the request, returned with its result.

    The caller keeps the memory mapped, and leaves it alone, until the request is reaped.
    """

    op: Op
    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]
    tag: int


class Reaped(NamedTuple):
    """The end of a request: bytes moved (perhaps fewer than requested), or a negative errno."""

    tag: int
    result: int


class DiskQueue(Protocol):
    """At most ``depth`` requests in the kernel at once. Not thread-safe: one thread drives it.

    ``event_fd`` is readable once something can be reaped. The executor waits for it, with its
    other events, and ``reap`` resets it.
    """

    name: str
    depth: int
    event_fd: int

    @property
    def in_flight(self) -> int:
        """Number of requests taken and not yet reaped."""

    def submit(self, requests: Sequence[Request]) -> int:
        """Hand requests to the kernel, in order. Return how many of them were taken.

        Fewer are taken when ``depth`` is reached or the kernel lacks resources; submit the rest
        again after the next ``reap``. An error of a single request arrives as its result.

        Raises:
            OSError: the queue itself is broken.
        """

    def reap(self) -> list[Reaped]:
        """Return all requests that have ended since the last call; never waits."""

    def close(self) -> None:
        """Give the queue back to the kernel. Requests in flight still move their bytes."""


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


_THREADS_MAX = 8


class ThreadQueue:
    """A few threads that call preadv and pwritev: the fallback where nothing better is allowed.

    A busy interpreter starves it, because each request needs the interpreter lock once.
    """

    name = "threads"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.event_fd = make_event()
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: deque[Reaped] = deque()
        self._in_flight = 0
        self._closed = False
        self._lock = threading.Lock()
        self._running = min(depth, _THREADS_MAX)  # threads; the last to end closes the event
        self._threads = [
            threading.Thread(target=self._run, name=f"kvhearth-ssd-{index}", daemon=True)
            for index in range(self._running)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, requests: Sequence[Request]) -> int:
        taken = min(len(requests), self.depth - self._in_flight)
        self._in_flight += taken
        for request in requests[:taken]:
            self._work.put(request)
        return taken

    def reap(self) -> list[Reaped]:
        reset_event(self.event_fd)
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._in_flight -= len(done)
        return done

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            try:
                result = _move(request)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            self._done.append(Reaped(request.tag, result))
            signal_event(self.event_fd)
        with self._lock:
            self._running -= 1
            if not self._running:
                os.close(self.event_fd)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            # One that hangs in the kernel is left there: it is a daemon thread.
            thread.join(timeout=0.2)


def _move(request: Request) -> int:
    if request.op is Op.SYNC:
        os.fdatasync(request.fd)
        return 0
    buffers = [(ctypes.c_char * length).from_address(at) for at, length in request.pieces]
    if request.op is Op.READ:
        return os.preadv(request.fd, buffers, request.offset)
    return os.pwritev(request.fd, buffers, request.offset)


_AIO_OPCODES = {Op.READ: (0, 7), Op.WRITE: (1, 8), Op.SYNC: (3, 3)}
"""For one piece, and for several."""
_RESULT_TO_EVENTFD = 1
_IOCB = struct.Struct("<QIIHhIQQqQII")
_EVENT = struct.Struct("<QQqq")


class AioQueue:
    """A context of ``depth`` requests of libaio's calls, which Docker's seccomp profile allows.

    Closing it waits until the kernel has ended them all.
    """

    name = "libaio"

    def __init__(self, depth: int) -> None:
        """Raises:
        OSError: ENOSYS where it is not allowed, EAGAIN beyond ``fs.aio-max-nr``.
        """
        setup, self._destroy, self._getevents, self._submit = aio_numbers()
        context = ctypes.c_ulong(0)
        system_call(setup, depth, ctypes.addressof(context))
        self._context = int(context.value)
        self.event_fd = make_event()
        self.depth = depth
        self._free = list(range(depth - 1, -1, -1))
        self._tags = [0] * depth
        self._iocbs = (ctypes.c_char * (_IOCB.size * depth))()
        self._iocbs_at = ctypes.addressof(self._iocbs)
        self._pointers = (ctypes.c_uint64 * depth)()
        self._events = (ctypes.c_char * (_EVENT.size * depth))()
        self._no_time = (ctypes.c_long * 2)()
        self._vectors = (ctypes.c_uint64 * (depth * PIECES_MAX * 2))()
        self._refused: deque[Reaped] = deque()

    @property
    def in_flight(self) -> int:
        return self.depth - len(self._free) + len(self._refused)

    def submit(self, requests: Sequence[Request]) -> int:
        offered = list(requests[: len(self._free)])
        slots = [self._fill(request) for request in offered]
        done = 0
        while done < len(slots):
            try:
                done += self._hand_over(slots[done:])
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR):
                    break
                if error.errno == errno.ENOSYS:
                    raise
                # The kernel examines one request after another: the first one is wrong.
                self._refused.append(Reaped(offered[done].tag, -(error.errno or errno.EIO)))
                self._free.append(slots[done])
                signal_event(self.event_fd)
                done += 1
        self._free.extend(slots[done:])
        return done

    def _fill(self, request: Request) -> int:
        slot = self._free.pop()
        self._tags[slot] = request.tag
        opcode, address, length = self._operands(request, slot)
        fields = (slot, 0, 0, opcode, 0, request.fd, address, length, request.offset, 0)
        _IOCB.pack_into(self._iocbs, slot * _IOCB.size, *fields, _RESULT_TO_EVENTFD, self.event_fd)
        return slot

    def _operands(self, request: Request, slot: int) -> tuple[int, int, int]:
        """Return opcode, address and length of a request. Several pieces become the slot's
        ``iovec`` array.
        """
        single, vectored = _AIO_OPCODES[request.op]
        if request.op is Op.SYNC:
            return single, 0, 0
        if len(request.pieces) == 1:
            return single, *request.pieces[0]
        at = slot * PIECES_MAX * 2
        for number in itertools.chain.from_iterable(request.pieces):
            self._vectors[at] = number
            at += 1
        return (
            vectored,
            ctypes.addressof(self._vectors) + slot * PIECES_MAX * 16,
            len(request.pieces),
        )

    def _hand_over(self, slots: list[int]) -> int:
        for index, slot in enumerate(slots):
            self._pointers[index] = self._iocbs_at + slot * _IOCB.size
        where = ctypes.addressof(self._pointers)
        return system_call(self._submit, self._context, len(slots), where)

    def reap(self) -> list[Reaped]:
        reset_event(self.event_fd)
        done = list(self._refused)
        self._refused.clear()
        events, no_time = ctypes.addressof(self._events), ctypes.addressof(self._no_time)
        try:
            count = system_call(self._getevents, self._context, 0, self.depth, events, no_time)
        except InterruptedError:
            signal_event(self.event_fd)
            return done
        for index in range(count):
            slot, _, result, _ = _EVENT.unpack_from(self._events, index * _EVENT.size)
            done.append(Reaped(self._tags[slot], result))
            self._free.append(slot)
        return done

    def close(self) -> None:
        if self._context:
            system_call(self._destroy, self._context)
            self._context = 0
            os.close(self.event_fd)
