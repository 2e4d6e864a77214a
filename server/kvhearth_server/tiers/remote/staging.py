"""Places in a mover's staging memory, given out by the daemon: a helper that is killed takes none
of the books with it.
"""

from __future__ import annotations

import bisect

PAGE_BYTES = 4096


class Staging:
    """Ranges of ``size`` bytes of memory, first fit.

    Attributes:
        size: all bytes.
        free_bytes: bytes that are not lent.
    """

    def __init__(self, size: int) -> None:
        self.size = self.free_bytes = size // PAGE_BYTES * PAGE_BYTES
        self._starts = [0]
        self._lengths = [self.size]

    def take(self, count: int, size: int) -> list[int] | None:
        """Lend ``count`` ranges of ``size`` bytes each; return their offsets, None without room for
        all of them.
        """
        whole = -(-size // PAGE_BYTES) * PAGE_BYTES
        if count * whole > self.free_bytes:
            return None
        taken: list[int] = []
        index = 0
        while len(taken) < count and index < len(self._starts):
            fitting = min(self._lengths[index] // whole, count - len(taken))
            if not fitting:
                index += 1
                continue
            start = self._starts[index]
            taken += range(start, start + fitting * whole, whole)
            self.free_bytes -= fitting * whole
            self._starts[index] += fitting * whole
            self._lengths[index] -= fitting * whole
            if not self._lengths[index]:
                del self._starts[index], self._lengths[index]
        if len(taken) == count:
            return taken
        self.give(taken, size)
        return None

    def give(self, offsets: list[int], size: int) -> None:
        """Take back ranges of ``size`` bytes each."""
        whole = -(-size // PAGE_BYTES) * PAGE_BYTES
        for offset in offsets:
            self._give(offset, whole)

    def _give(self, start: int, length: int) -> None:
        index = bisect.bisect(self._starts, start)
        before = index - 1
        self.free_bytes += length
        if index < len(self._starts) and start + length == self._starts[index]:
            length += self._lengths[index]
            del self._starts[index], self._lengths[index]
        if before >= 0 and self._starts[before] + self._lengths[before] == start:
            self._lengths[before] += length
            return
        self._starts.insert(index, start)
        self._lengths.insert(index, length)
