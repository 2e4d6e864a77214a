"""Faults of a daemon's process that follow files: clocks that jump, and drives that misbehave.

``harness.daemon_main`` runs a daemon with them.

The machine's clock is shared by all processes and must not be set. The daemon therefore runs
unchanged, and only its ``time.time`` and ``time.monotonic`` add offsets from a file: two numbers of
seconds, for the wall clock (either sign) and for the monotonic one (never less than before, as the
kernel promises).

Only if the environment names a file (``KVHEARTH_DISK_FAULTS``) are the daemon's disk queue and its
file operations wrapped in classes of this module. The file holds one JSON object and is read again
whenever it changes::

    errors   {"read" | "write" | "sync": errno} requests end so without reaching the device
    rate     share of requests that ``errors`` and ``short`` hit, 1 by default
    short    ["read", ...] results are half of their proper size
    held     ["write", ...] results are held back until no longer named
    delay_s  delay of results, seconds
    make     errno with which the making of a segment file fails, 0 for none
    read_back_s  additional seconds of each read during recovery of the log
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.failpoints import DISK_ENVIRONMENT_NAME
from kvhearth_server.tiers.ssd.disk.queues import DiskQueue, Op, Reaped, Request, signal_event
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.tier import Environment

_FIELDS = struct.Struct("<dd")


def set_offsets(path: Path, wall_s: float, monotonic_s: float) -> None:
    """Write the offsets of a daemon's clocks; a running one follows at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, _FIELDS.pack(wall_s, monotonic_s), 0)
    finally:
        os.close(descriptor)


def follow(path: Path) -> None:
    """Make this process's clocks follow the file; call it before anything else is imported."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    page = mmap.mmap(descriptor, _FIELDS.size, prot=mmap.PROT_READ)
    os.close(descriptor)
    wall, monotonic = time.time, time.monotonic

    def skewed_wall() -> float:
        return wall() + float(_FIELDS.unpack_from(page)[0])

    def skewed_monotonic() -> float:
        return monotonic() + float(_FIELDS.unpack_from(page)[1])

    time.time, time.monotonic = skewed_wall, skewed_monotonic


@dataclass
class Faults:
    """Faults of a queue. May be changed from any thread while the queue runs.

    Attributes:
        errors: errno with which requests of an op end without reaching the device.
        rate: share of the requests that ``errors`` and ``short`` hit.
        short: ops whose results are half of their proper size.
        held: ops whose results are held back until they are no longer named here.
    """

    errors: dict[Op, int] = field(default_factory=dict)
    rate: float = 1.0
    short: frozenset[Op] = frozenset()
    held: frozenset[Op] = frozenset()


class FaultyQueue:
    """Passes requests on to ``inner``, or fails, shortens or delays them."""

    def __init__(self, inner: DiskQueue, faults: Faults) -> None:
        self.name, self.depth, self.event_fd = inner.name, inner.depth, inner.event_fd
        self.faults = faults
        self._inner = inner
        self._random = random.Random(0)
        self._requests: dict[int, Request] = {}
        self._ready: list[Reaped] = []
        self._kept: list[Reaped] = []

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> int:
        taken = 0
        for request in requests:
            if self.in_flight >= self.depth:
                break
            error = self.faults.errors.get(request.op, 0)
            if error and self._hits():
                self._ready.append(Reaped(request.tag, -error))
                signal_event(self.event_fd)
            elif not self._inner.submit([request]):
                break
            self._requests[request.tag] = request
            taken += 1
        return taken

    def reap(self) -> list[Reaped]:
        found = [*self._ready, *self._kept, *self._inner.reap()]
        self._ready, self._kept = [], []
        done = []
        for each in found:
            request = self._requests[each.tag]
            if request.op in self.faults.held:
                self._kept.append(each)
                continue
            del self._requests[each.tag]
            short = each.result > 0 and request.op in self.faults.short and self._hits()
            done.append(Reaped(each.tag, each.result // 2) if short else each)
        return done

    def wake(self) -> None:
        """Make the driver look again, since held results may be released."""
        os.eventfd_write(self.event_fd, 1)

    def close(self) -> None:
        self._inner.close()

    def _hits(self) -> bool:
        return self._random.random() < self.faults.rate


_EVERY_S = 0.01


def commanded() -> Commander | None:
    """Return the commander of this process's drives; None, as in production, without the
    variable.
    """
    path = os.environ.get(DISK_ENVIRONMENT_NAME)
    return Commander(Path(path)) if path else None


@dataclass
class Orders:
    """Fields of the file beside ``Faults``."""

    delay_s: float = 0.0
    make: int = 0
    read_back_s: float = 0.0


class Commander:
    """Reads the file, on its own thread once there is a queue."""

    def __init__(self, path: Path) -> None:
        self.faults = Faults()
        self.orders = Orders()
        self._path = path
        self._read_at: tuple[int, int] = (0, 0)
        self._queues: list[CommandedQueue] = []
        self._look()

    def queue(self, inner: DiskQueue) -> CommandedQueue:
        """Wrap ``inner`` in a commanded queue."""
        made = CommandedQueue(inner, self)
        if not self._queues:
            threading.Thread(target=self._run, name="kvhearth-disk-faults", daemon=True).start()
        self._queues.append(made)
        return made

    def environment(self) -> Environment:
        """Return commanded files and disk queue for an SSD tier."""
        return Environment(files=self.files(), wrap_queue=self.queue)

    def files(self) -> Files:
        """Return commanded file operations."""
        return _CommandedFiles(self)

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            changed = self._look()
            for each in self._queues:
                if changed or each.keeps:
                    each.wake()

    def _look(self) -> bool:
        try:
            found = self._path.stat()
            now = (found.st_mtime_ns, found.st_ino)
            if now == self._read_at:
                return False
            said: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        self._read_at = now
        ops = {op.name.lower(): op for op in Op}
        faults = self.faults
        faults.rate = float(said.get("rate", 1.0))
        faults.errors = {ops[name]: int(code) for name, code in said.get("errors", {}).items()}
        faults.short = frozenset(ops[name] for name in said.get("short", ()))
        faults.held = frozenset(ops[name] for name in said.get("held", ()))
        self.orders = Orders(
            float(said.get("delay_s", 0.0)),
            int(said.get("make", 0)),
            float(said.get("read_back_s", 0.0)),
        )
        return True


class CommandedQueue:
    """A queue whose results obey the commander. Driven by one thread, as any queue."""

    def __init__(self, inner: DiskQueue, commander: Commander) -> None:
        self.name, self.depth, self.event_fd = inner.name, inner.depth, inner.event_fd
        self._faulty = FaultyQueue(inner, commander.faults)
        self._commander = commander
        self._late: list[tuple[float, Reaped]] = []
        self._closed = False

    @property
    def in_flight(self) -> int:
        return self._faulty.in_flight + len(self._late)

    @property
    def keeps(self) -> bool:
        """Whether a result is held back."""
        return bool(self._late)

    def submit(self, requests: Sequence[Request]) -> int:
        return self._faulty.submit(requests[: max(0, self.depth - self.in_flight)])

    def reap(self) -> list[Reaped]:
        now = time.monotonic()
        found = self._faulty.reap()
        delay_s = self._commander.orders.delay_s
        if delay_s:
            self._late += [(now + delay_s, each) for each in found]
            found = []
        if self._late:
            found += [each for due, each in self._late if now >= due or not delay_s]
            self._late = [pair for pair in self._late if now < pair[0] and delay_s]
        return found

    def wake(self) -> None:
        """Make the driver look again."""
        if not self._closed:
            self._faulty.wake()

    def close(self) -> None:
        self._closed = True
        self._faulty.close()


class _CommandedFiles(Files):
    """File operations that refuse segment files and slow recovery down while the commander says
    so.
    """

    def __init__(self, commander: Commander) -> None:
        self._commander = commander

    def allocate(self, fd: int, size_bytes: int) -> int:
        if code := self._commander.orders.make:
            raise OSError(code, os.strerror(code))
        return super().allocate(fd, size_bytes)

    def read_into(self, fd: int, memory: memoryview, offset: int) -> int:
        time.sleep(self._commander.orders.read_back_s)
        return super().read_into(fd, memory, offset)
