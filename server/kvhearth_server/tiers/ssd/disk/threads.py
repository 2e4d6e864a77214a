"""Disk queue that calls preadv and pwritev on threads: the fallback where io_uring and libaio are
not allowed.

A busy interpreter starves it, because each request needs the interpreter lock once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence

from kvhearth_server.tiers.ssd.disk.base import Op, Reaped, Request
from kvhearth_server.tiers.ssd.disk.syscalls import make_event, reset_event, signal_event

_THREADS_MAX = 8


class ThreadQueue:
    """A few threads that block in the kernel on behalf of the driver."""

    name = "threads"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.event_fd = make_event()
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: deque[Reaped] = deque()
        self._in_flight = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"kvhearth-ssd-{index}", daemon=True)
            for index in range(min(depth, _THREADS_MAX))
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
            with contextlib.suppress(OSError):  # closed meanwhile
                signal_event(self.event_fd)

    def close(self) -> None:
        if self.event_fd < 0:
            return
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            # A thread that hangs in the kernel is left there: it is a daemon thread.
            thread.join(timeout=0.2)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.event_fd)
            self.event_fd = -1


def _move(request: Request) -> int:
    if request.op is Op.SYNC:
        os.fdatasync(request.fd)
        return 0
    buffers = [(ctypes.c_char * length).from_address(at) for at, length in request.pieces]
    if request.op is Op.READ:
        return os.preadv(request.fd, buffers, request.offset)
    return os.pwritev(request.fd, buffers, request.offset)
