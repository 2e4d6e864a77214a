"""Probes the kernel interfaces for disk I/O, best first, and reports why the others do not work."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvhearth_server.tiers.ssd.disk.queues import (
    AioQueue,
    DiskQueue,
    Op,
    Request,
    ThreadQueue,
)

_PROBE_DEPTH = 2
_PROBE_BYTES = 64
_PROBE_DEADLINE_S = 2.0

_MAKERS: dict[str, Callable[[int], DiskQueue]] = {
    "libaio": AioQueue,
    "threads": ThreadQueue,
}
NAMES = tuple(_MAKERS)
"""Names of all interfaces, best first."""

_WHY = {
    ("libaio", errno.EPERM): "not permitted: a seccomp profile",
    ("libaio", errno.EAGAIN): "fs.aio-max-nr is used up; raise it with sysctl",
}


@dataclass(frozen=True)
class ProbeResult:
    """Result of probing a kernel interface; ``reason`` is empty if it works."""

    name: str
    reason: str

    @property
    def works(self) -> bool:
        return not self.reason


def probe(name: str, depth: int = _PROBE_DEPTH) -> ProbeResult:
    """Try one interface with a real read, at ``depth``: some limits show only at the real depth."""
    try:
        queue = _MAKERS[name](depth)
    except OSError as error:
        return ProbeResult(name, _reason(name, error))
    try:
        return ProbeResult(name, _try_read(queue))
    except OSError as error:
        return ProbeResult(name, _reason(name, error))
    finally:
        queue.close()


def choose(
    wanted: str = "auto",
    depth: int = _PROBE_DEPTH,
    tried: Callable[[str, int], ProbeResult] = probe,
) -> tuple[str, list[ProbeResult]]:
    """Return the interface to use, and the results of all that were ``tried`` at ``depth``.

    Raises:
        ValueError: no such interface.
        OSError: the interface requested by name does not work here, or none works.
    """
    if wanted != "auto":
        if wanted not in _MAKERS:
            raise ValueError(f"{wanted!r} is no disk interface; one of auto, {', '.join(NAMES)}")
        verdict = tried(wanted, depth)
        if not verdict.works:
            raise OSError(errno.ENOSYS, f"{wanted}: {verdict.reason}")
        return wanted, [verdict]
    probe_results = []
    for name in NAMES:
        probe_results.append(tried(name, depth))
        if probe_results[-1].works:
            return name, probe_results
    raise OSError(errno.ENOSYS, "; ".join(f"{each.name}: {each.reason}" for each in probe_results))


def open_queue(name: str, depth: int) -> DiskQueue:
    """Open a queue of the interface ``name``.

    Raises:
        OSError: it is not available.
    """
    return _MAKERS[name](depth)


def _reason(name: str, error: OSError) -> str:
    return _WHY.get((name, error.errno or 0)) or error.strerror or str(error)


def _try_read(queue: DiskQueue) -> str:
    """Read a file that always exists. Return the problem, empty for none."""
    buffer = (ctypes.c_char * _PROBE_BYTES)()
    descriptor = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        expected = os.pread(descriptor, _PROBE_BYTES, 0)
        pieces = ((ctypes.addressof(buffer), _PROBE_BYTES),)
        queue.submit([Request(Op.READ, descriptor, 0, pieces, 7)])
        end = time.monotonic() + _PROBE_DEADLINE_S
        poll = select.poll()
        poll.register(queue.event_fd, select.POLLIN)
        while time.monotonic() < end:
            poll.poll(100)
            for tag, result in queue.reap():
                if result < 0:
                    return os.strerror(-result)
                good = tag == 7 and result == len(expected) and buffer.raw == expected
                return "" if good else "a read gave other bytes than the file has"
    finally:
        os.close(descriptor)
    return f"a read did not end within {_PROBE_DEADLINE_S:g} s"
