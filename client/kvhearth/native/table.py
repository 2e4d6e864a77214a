"""The shared index of one segment: written by the daemon, read by clients that map it.

Memory of a table, in order: for each namespace number a word with its epoch above its first space
(number 0 is no namespace's: its word counts the blocks that found no room); eight words of which
the first has the bytes that may still be leased; the cells; an entry of 64 bytes for each slot (see
``src/table.c``). A space stands for a KV group of a namespace in one epoch; no number is used twice
in a run of the daemon, so that a new epoch voids all older entries at once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvhearth.native import library

KEY_BYTES_MAX = 32
"""Longest key that an entry holds."""
SPACE_MAX = (1 << 31) - 1
NAMESPACES = 1 << 16
_ROWS = NAMESPACES + 8
_CELL_BYTES, _ENTRY_BYTES, _ROW_BYTES = 8, 64, 8
_CELLS_MIN = 16
_EXTENT_BYTES = 40
"""Of ``EXTENT_DTYPE``."""


@dataclass(frozen=True)
class Shape:
    """Size of a table, and the geometry of the segment that it is for.

    Attributes:
        segment: its number.
        segment_bytes: its size.
        first_slot, slot_count: numbers of its slots.
        stride: slot numbers in a slab.
        slab_bytes: size of a slab.
        slot_bytes_min: unit of slot sizes.
        seed: of the hash; random, so that keys do not collide by chance alone.
    """

    segment: int
    segment_bytes: int
    first_slot: int
    slot_count: int
    stride: int
    slab_bytes: int
    slot_bytes_min: int
    seed: int

    @property
    def cell_count(self) -> int:
        """Number of cells: a power of two, at least two for a slot."""
        return max(_CELLS_MIN, 1 << (2 * self.slot_count - 1).bit_length())

    @property
    def bytes(self) -> int:
        """Size of the table."""
        rows, cells = _ROWS * _ROW_BYTES, self.cell_count * _CELL_BYTES
        return rows + cells + self.slot_count * _ENTRY_BYTES


class _Pointers(ctypes.Structure):
    """``kvh_table``."""

    _fields_ = [
        ("cells", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("generations", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("slab_bytes", ctypes.c_uint64),
        ("slot_bytes_min", ctypes.c_uint64),
        ("segment_bytes", ctypes.c_uint64),
        ("cell_count", ctypes.c_uint32),
        ("first_slot", ctypes.c_uint32),
        ("slot_count", ctypes.c_uint32),
        ("stride", ctypes.c_uint32),
        ("segment", ctypes.c_uint32),
    ]


# Called with the interpreter's lock held: another thread would keep it for longer than these take.
_I64, _U32, _PLACE = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
_BYTES = ctypes.c_char_p
_PUT = ctypes.PYFUNCTYPE(_I64, _PLACE, _U32, _I64, _I64, _BYTES, _BYTES, _I64, _PLACE, _PLACE)
_FIND = ctypes.PYFUNCTYPE(_I64, _PLACE, _U32, _I64, _I64, _BYTES, _I64, _U32, _BYTES, _BYTES)


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        hits: number of keys that were found.
        extents: bytes of (n, shards) records of ``EXTENT_DTYPE``, zeros for keys that were not
            found, and one byte more.
        mask: 1 for each key that was found, 0 for the others, and one byte more; None if the search
            ended at the first that was not.
        doubtful: True if one of the others may be there all the same: its entry was being written
            for too long. The writer may have died.
    """

    hits: int
    extents: bytes
    mask: bytes | None
    doubtful: bool = False


class Table:
    """A table over memory.

    Args:
        shape: checked by the caller: all numbers positive, the slots inside ``generations``.
        memory: its bytes, shape (shape.bytes,); zeros mean empty.
        generations: live generation of each slot of the arena, u32.

    Raises:
        OSError: there is no native module.
    """

    def __init__(
        self,
        shape: Shape,
        memory: npt.NDArray[np.uint8],
        generations: npt.NDArray[np.uint32],
    ) -> None:
        native = library()
        if native is None:
            raise OSError("the native module is not available")
        self.shape = shape
        self._find, self._put = _FIND(("kvh_table_find", native)), _PUT(("kvh_table_put", native))
        self._kept = memory, generations
        rows_end = _ROWS * _ROW_BYTES
        cells_end = rows_end + shape.cell_count * _CELL_BYTES
        self._rows = memory[:rows_end].view(np.uint64)
        self.room = self._rows[NAMESPACES : NAMESPACES + 1]
        """The word with ``room_bytes``, shape (1,)."""
        self.entries = memory[cells_end : shape.bytes].view(np.uint64).reshape(-1, 8)
        """Entries as words, shape (slot_count, 8)."""
        start = int(memory.ctypes.data)
        self._pointers = _Pointers(
            start + rows_end,
            start + cells_end,
            int(generations.ctypes.data),
            shape.seed,
            shape.slab_bytes,
            shape.slot_bytes_min,
            shape.segment_bytes,
            shape.cell_count,
            shape.first_slot,
            shape.slot_count,
            shape.stride,
            shape.segment,
        )
        self._address = ctypes.addressof(self._pointers)

    def space(self, namespace: int, epoch: int) -> int:
        """First space of a namespace, by its number; 0 unless ``epoch`` is its current one."""
        row: int = self._rows.item(namespace)
        return row & 0xFFFF_FFFF if row >> 32 == epoch else 0

    @property
    def unplaced_count(self) -> int:
        """Number of blocks so far that found no room, so that the table does not have them."""
        count: int = self._rows.item(0)
        return count

    @property
    def room_bytes(self) -> int:
        """Bytes of slots that may still be leased, when the daemon last wrote it."""
        room: int = self.room.item(0)
        return room

    def slot_bytes(self, page_bytes: int) -> int:
        """Return the size of the slot of a shard."""
        return -(-page_bytes // self.shape.slot_bytes_min) * self.shape.slot_bytes_min

    def intact(self, extents: npt.NDArray[np.void]) -> bool:
        """Whether the slots of extents have the generations that they had."""
        _, generations = self._kept
        return bool((generations[extents["slot"]] == extents["generation"]).all())

    def use(self, namespace: int, epoch: int, space: int) -> None:
        """Set the first space of a namespace; 0 takes its blocks out of the table."""
        self._rows[namespace] = epoch << 32 | space

    def find(
        self,
        space: int,
        keys: bytes,
        key_bytes: int,
        page_bytes: int,
        shards: int = 1,
        *,
        every: bool = True,
    ) -> Found:
        """Find keys.

        Args:
            keys: n keys of ``key_bytes``, at most ``KEY_BYTES_MAX``.
            page_bytes: size of one shard.
            shards: of a block.
            every: go on after a key that is not found.
        """
        count = len(keys) // key_bytes
        # New bytes, which nobody else has seen yet, are written by the call. To make an array and
        # to ask for its address takes four times as long. One byte more: single bytes are shared.
        extents = bytes(count * shards * _EXTENT_BYTES + 1)
        mask = bytes(count + 1) if every else None
        hits: int = self._find(
            self._address, space, count, shards, keys, key_bytes, page_bytes, extents, mask
        )
        if hits < 0:
            return Found(-1 - hits, extents, mask, doubtful=True)
        return Found(hits, extents, mask)

    def put(
        self,
        space: int,
        slots: npt.NDArray[np.int64],
        keys: bytes,
        key_bytes: int,
        checksums: int,
        flags: int,
    ) -> int:
        """Publish blocks that may be served, at their slots' live generations.

        Args:
            slots: (n, shards) numbers of this segment's slots, heads first.
            keys: n keys of ``key_bytes``, at most ``KEY_BYTES_MAX``.
            checksums, flags: addresses of the columns by slot number, 16 bytes and 1 byte each.

        Returns:
            The number of blocks that found room; the others are counted in ``unplaced_count``.
        """
        count, shards = slots.shape
        got: int = self._put(
            self._address,
            space,
            count,
            shards,
            slots.tobytes(),
            keys,
            key_bytes,
            checksums,
            flags,
        )
        if got < count:
            self._rows[0] += np.uint64(count - got)
        return got
