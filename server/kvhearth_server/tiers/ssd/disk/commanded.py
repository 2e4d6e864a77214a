"""A drive that misbehaves on command from outside: how ``kvhearth torture`` reaches a real daemon.

Only where the environment names a file (``KVHEARTH_DISK_FAULTS``) the daemon's disk queue and its
door to files are wrapped in these. The file holds one JSON object, read again whenever it changes:

    errors   {"read" | "write" | "sync": errno} requests end so without reaching the device
    rate     share of requests that ``errors`` and ``short`` hit, 1 by default
    short    ["read", ...] results are half of what they should be
    held     ["write", ...] results are kept back until no longer named
    delay_s  results are kept back for so long
    make     errno that making a segment file ends with, 0 for none
    read_back_s  each read with which the log is read back at the start takes so much longer
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.faults import DISK_ENVIRONMENT_NAME
from kvhearth_server.tiers.ssd.disk.base import DiskQueue, Op, Reaped, Request
from kvhearth_server.tiers.ssd.disk.faulty import Faults, FaultyQueue
from kvhearth_server.tiers.ssd.files import Files

_EVERY_S = 0.01


def commanded() -> Commander | None:
    """Whoever commands this process's drives; None, as it should be, if nobody does."""
    path = os.environ.get(DISK_ENVIRONMENT_NAME)
    return Commander(Path(path)) if path else None


@dataclass
class Orders:
    """What the file says beside ``Faults``."""

    delay_s: float = 0.0
    make: int = 0
    read_back_s: float = 0.0


class Commander:
    """Reads the file, on a thread of its own once there is a queue."""

    def __init__(self, path: Path) -> None:
        self.faults = Faults()
        self.orders = Orders()
        self._path = path
        self._read_at: tuple[int, int] = (0, 0)
        self._queues: list[CommandedQueue] = []
        self._look()

    def queue(self, inner: DiskQueue) -> CommandedQueue:
        """``inner``, commanded."""
        made = CommandedQueue(inner, self)
        if not self._queues:
            threading.Thread(target=self._run, name="kvhearth-disk-faults", daemon=True).start()
        self._queues.append(made)
        return made

    def files(self) -> Files:
        """A door to files, commanded."""
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
            said: dict[str, Any] = json.loads(self._path.read_text())
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
    """A queue whose results come as the commander says. One thread drives it, as any queue."""

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
        """Whether a result is kept back."""
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
        """Have the driver look again."""
        if not self._closed:
            self._faulty.wake()

    def close(self) -> None:
        self._closed = True
        self._faulty.close()


class _CommandedFiles(Files):
    """Makes no segment file, and reads the log back slowly, while the commander says so."""

    def __init__(self, commander: Commander) -> None:
        self._commander = commander

    def allocate(self, fd: int, size_bytes: int) -> int:
        if code := self._commander.orders.make:
            raise OSError(code, os.strerror(code))
        return super().allocate(fd, size_bytes)

    def read_into(self, fd: int, memory: memoryview, offset: int) -> int:
        time.sleep(self._commander.orders.read_back_s)
        return super().read_into(fd, memory, offset)
