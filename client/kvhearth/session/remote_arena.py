"""A client's view of an arena on another host: its bounds, the way to its bytes, staging memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, U32
from kvhearth.prefault import Unpopulated
from kvhearth.transports.data import DataLines
from kvhearth.wire.handshake import Welcome

_ALIGN_BYTES = 4096


class Space(NamedTuple):
    """A part of the staging memory."""

    offset: int
    size_bytes: int


class Staging:
    """Memory that blocks pass between a device and the network, as an ``ArenaView`` of one segment.

    It is taken in spaces and given back. Pages of it exist once they are used. Thread-safe.

    Args:
        boot_id: boot of the daemon whose blocks pass.
        size_bytes: bound of all spaces.
        alive: whether the daemon of that boot lives.
        freed: called after a space was given back.
    """

    def __init__(
        self,
        boot_id: str,
        size_bytes: int,
        alive: Callable[[], bool],
        freed: Callable[[], None],
    ) -> None:
        self.boot_id = boot_id
        self.segments = {0: size_bytes}
        self.generations: U32 = np.zeros(1, np.uint32)
        self.unpopulated = Unpopulated()
        self.alive = alive
        self._freed = freed
        self._lock = threading.Lock()
        self._free = [Space(0, size_bytes)]
        memory = mmap.mmap(-1, size_bytes)
        memory.madvise(mmap.MADV_DONTFORK)
        self._bytes: U8 = np.frombuffer(memory, np.uint8)

    def view(self, segment: int) -> U8:
        """Return the memory, shape (size_bytes,)."""
        assert segment == 0, f"staging memory has no segment {segment}"
        return self._bytes

    def address(self, segment: int) -> int:
        """Return its address."""
        return int(self.view(segment).ctypes.data)

    def take(self, size_bytes: int) -> Space | None:
        """Return a space of at least that size, or None if there is none now."""
        size_bytes = -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        with self._lock:
            for index, free in enumerate(self._free):
                if free.size_bytes >= size_bytes:
                    rest = Space(free.offset + size_bytes, free.size_bytes - size_bytes)
                    self._free[index : index + 1] = [rest] if rest.size_bytes else []
                    return Space(free.offset, size_bytes)
        return None

    def give_back(self, space: Space) -> None:
        """Return a space that nothing uses any more."""
        with self._lock:
            joined: list[Space] = []
            for each in sorted([*self._free, space]):
                last = joined[-1] if joined else None
                if last is not None and last.offset + last.size_bytes == each.offset:
                    joined[-1] = Space(last.offset, last.size_bytes + each.size_bytes)
                else:
                    joined.append(each)
            self._free = joined
        self._freed()

    def check_books(self) -> None:
        """Raise AssertionError if spaces were lost; for when nothing is under way."""
        with self._lock:
            assert self._free == [Space(0, self.segments[0])], f"spaces in use: {self._free}"


class RemoteArena:
    """The segments of one boot of a daemon on another host.

    Args:
        welcome: names the segments.
        lines: the way to their bytes; owned from then on.
        staging_bytes: size of the staging memory.
        alive: whether the session may be used.

    Attributes:
        segments: bytes of each segment, by segment number.
        slot_count: number of slots.
        lines: carry the bytes.
        staging: memory for bytes that cannot go straight from pages to the network.
    """

    def __init__(
        self, welcome: Welcome, lines: DataLines, staging_bytes: int, alive: Callable[[], bool]
    ) -> None:
        self.boot_id = welcome.boot_id
        self.segments = {info.segment: info.bytes for info in welcome.segments}
        self.slot_count = welcome.generation_count
        self.lines = lines
        self._alive = alive
        try:
            self.staging = Staging(welcome.boot_id, staging_bytes, alive, lines.wake)
        except OSError as error:
            raise KVHearthError(
                Reason.MEMORY_UNAVAILABLE, f"no {staging_bytes} bytes of staging memory: {error}"
            ) from None

    def alive(self) -> bool:
        """Return whether the session may be used; once False, it stays False."""
        return not self.lines.closed and self._alive()

    def close(self) -> None:
        """End the connections. Idempotent."""
        self.lines.close()
