"""Memory of a helper: the arena by passed descriptors, and staging of its own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvhearth.model import CHECKSUM_BYTES, I64, U8, Records, checksum_of
from kvhearth.native.blocks import BlockMover, address_of, block_mover
from kvhearth.shared_memory import MADV_POPULATE_WRITE, SharedMapping, advise
from kvhearth_server.tiers.base import BlockSpec
from kvhearth_server.tiers.remote.mover import Get, Put
from kvhearth_server.tiers.remote.record import (
    Doubt,
    Head,
    heads_of,
    payload_offset,
    read_heads,
)

_HUGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000
_BOOLS = npt.NDArray[np.bool_]


def _staging(size: int) -> U8:
    """Map memory of its own, in huge pages where there are any."""
    whole = -(-size // _HUGE_BYTES) * _HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, whole, flags=flags | _MAP_HUGETLB)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EINVAL, errno.EPERM):
            raise
        memory = mmap.mmap(-1, whole, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    # Faulted in now; before Linux 5.14 as it is used.
    advise(address_of(found), whole, MADV_POPULATE_WRITE)
    return found


class Memory:
    """The arena's regions and the staging memory. Its methods may run in any thread.

    Args:
        regions: descriptor and size of each arena segment; the descriptors are left open, since
            the locks that they bear tell the daemon who maps the arena.
    """

    def __init__(self, regions: Sequence[tuple[int, int]], staging_bytes: int) -> None:
        self._regions = [np.asarray(SharedMapping(fd, size)) for fd, size in regions]
        self._starts = np.array([address_of(region) for region in self._regions], np.int64)
        self._sizes = np.array([len(region) for region in self._regions], np.int64)
        self._least = min(self._sizes.tolist(), default=0)
        self._staging = _staging(staging_bytes)
        self._movers: dict[int, BlockMover | None] = {}

    @property
    def staging(self) -> memoryview:
        """The staging memory."""
        return self._staging.data

    def staged(self, offset: int, size: int) -> memoryview:
        """Return a place in staging.

        Raises:
            ValueError: it is not inside.
        """
        found = self._staging[offset : offset + size]
        if len(found) != size:
            raise ValueError(f"no {size} bytes of staging at {offset}")
        return found.data

    def check(self, request: Get) -> None:
        """Check a request's slots.

        Raises:
            ValueError: one is outside the arena.
        """
        places, length = request.places, request.family.length
        most = int(places["offset"].max(initial=0)) + length
        if most <= self._least and int(places["region"].max(initial=0)) < len(self._sizes):
            return
        region, offset = places["region"].astype(np.int64), places["offset"].astype(np.int64)
        known = (region >= 0) & (region < len(self._sizes))
        ends = self._sizes[np.where(known, region, 0)] - length
        if not (known & (offset >= 0) & (offset <= ends)).all():
            raise ValueError("a place is outside the arena")

    def write_heads(self, request: Put, offsets: Sequence[int]) -> None:
        """Write the start of each of a request's records to its place in staging."""
        heads = heads_of(
            request.space, request.family, request.keys, request.checksums, request.parents
        )
        view = self._staging.data
        for offset, head in zip(offsets, heads, strict=True):
            view[offset : offset + len(head)] = head

    def stage(self, request: Put, offsets: Sequence[int], rows: range) -> _BOOLS:
        """Copy blocks from their slots to staging.

        Returns:
            Whether each had the bytes of its checksums, shape (rows,).
        """
        some = slice(rows.start, rows.stop)
        records = address_of(self._staging) + np.array(offsets[some], np.int64)
        found = self._copy(request.family, records, request.places[some], to_slots=False)
        wanted = np.ascontiguousarray(request.checksums[some]).view(np.uint8)
        same: _BOOLS = (found.reshape(len(rows), -1) == wanted.reshape(len(rows), -1)).all(axis=1)
        return same

    def unstage(
        self, request: Get, rows: Sequence[int], records: Sequence[U8]
    ) -> list[Head | Doubt]:
        """Verify records, copying their blocks to the slots of ``rows`` in the same pass.

        Returns:
            The header of each. After a doubt its slots' bytes are undefined.
        """
        family = request.family
        heads = read_heads(records, request.space, family, [request.keys[row] for row in rows])
        good = [number for number, head in enumerate(heads) if isinstance(head, Head)]
        if not good:
            return heads
        at = np.array([address_of(records[number]) for number in good], np.int64)
        places = request.places[[rows[number] for number in good]]
        found = self._copy(family, at, places, to_slots=True).tobytes()
        wanted = [head.checksums for head in heads if isinstance(head, Head)]
        if found == b"".join(wanted):
            return heads
        size = family.shards * CHECKSUM_BYTES
        for turn, number in enumerate(good):
            if found[turn * size : (turn + 1) * size] != wanted[turn]:
                heads[number] = Doubt.TORN
        return heads

    def _copy(self, family: BlockSpec, records: I64, places: Records, *, to_slots: bool) -> U8:
        """Copy the shards of records at addresses to their slots, or back; return the checksums of
        their bytes, shape (n * shards, 16).
        """
        length = family.length
        within = payload_offset(family.shards) + length * np.arange(family.shards)
        shards = (records[:, None] + within).ravel()
        slots = (self._starts[places["region"]] + places["offset"].astype(np.int64)).ravel()
        if length not in self._movers:
            # Pages one byte apart are addresses.
            self._movers[length] = block_mover([(0, 1, length)])
        mover = self._movers[length]
        if mover is not None:
            _, sums = mover.move(shards, slots, to_slots=to_slots, sums=True)
            assert sums is not None
            return sums
        return _copy_plainly(shards, slots, length, to_slots=to_slots)


def _copy_plainly(shards: I64, slots: I64, length: int, *, to_slots: bool) -> U8:
    """Copy and checksum without the native module."""
    sums = bytearray()
    for shard, slot in zip(shards.tolist(), slots.tolist(), strict=True):
        source, target = (shard, slot) if to_slots else (slot, shard)
        ctypes.memmove(target, source, length)
        sums += checksum_of((ctypes.c_char * length).from_address(target))
    return np.frombuffer(sums, np.uint8).reshape(-1, CHECKSUM_BYTES)
