"""A table of the shared index in memory, and a process that writes one all the time."""

from __future__ import annotations

import mmap
import sys

import numpy as np

from kvhearth.model import EXTENT_DTYPE, U8, Bools, Records
from kvhearth.native.table import Shape, Table

FIRST, PAGE = 256, 4096
SPACE = 5


def shape_of(slots: int) -> Shape:
    """A segment of slabs of 64 slots of a page, behind others."""
    return Shape(
        segment=3,
        segment_bytes=slots * PAGE,
        first_slot=FIRST,
        slot_count=slots,
        stride=64,
        slab_bytes=64 * PAGE,
        slot_bytes_min=PAGE,
        seed=7,
    )


class Rig:
    """A table, and the columns of the core that it reads."""

    def __init__(self, slots: int, memory: U8 | None = None, generations: U8 | None = None) -> None:
        shape = shape_of(slots)
        self.memory = np.zeros(shape.bytes, np.uint8) if memory is None else memory
        raw = np.zeros(4 * (FIRST + slots), np.uint8) if generations is None else generations
        self.generations = raw.view(np.uint32)
        self.table = Table(shape, self.memory, self.generations)
        self.sums = np.zeros((FIRST + slots, 16), np.uint8)
        self.flags = np.zeros(FIRST + slots, np.uint8)

    def put(
        self, keys: list[bytes], slots: list[list[int]], *, space: int = SPACE, width: int = 32
    ) -> int:
        """Publish blocks; the checksum of each slot begins with its key."""
        rows = np.array(slots, np.int64) + FIRST
        for key, row in zip(keys, rows, strict=True):
            self.sums[row] = np.frombuffer(key[:16].ljust(16, b"\0"), np.uint8)
        columns = self.sums.ctypes.data, self.flags.ctypes.data
        return self.table.put(space, rows, b"".join(keys), width, *columns)

    def find(
        self, keys: list[bytes], *, shards: int = 1, space: int = SPACE, width: int = 32
    ) -> tuple[Bools, Records]:
        """Which keys are found, and the extents."""
        seen = self.table.find(space, b"".join(keys), width, PAGE, shards)
        assert seen.mask is not None
        found = np.frombuffer(seen.mask[:-1], np.bool_)
        assert seen.hits == np.count_nonzero(found)
        extents = np.frombuffer(seen.extents[:-1], EXTENT_DTYPE)
        return found, extents.reshape(len(keys), shards)


def names(count: int, start: int = 0, width: int = 32) -> list[bytes]:
    """Different keys."""
    return [number.to_bytes(width, "big") for number in range(start, start + count)]


def main(table: str, generations: str, slots: str) -> None:
    """Write two sets of blocks in turns to the same slots, into inherited descriptors."""
    files = [mmap.mmap(int(place), 0) for place in (table, generations)]
    rig = Rig(int(slots), *(np.frombuffer(file, np.uint8) for file in files))
    rows = [[number] for number in range(int(slots))]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    turn = 0
    while True:
        rig.generations[:] += np.uint32(1)
        rig.put(names(len(rows), turn % 2 * len(rows)), rows)
        turn += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
