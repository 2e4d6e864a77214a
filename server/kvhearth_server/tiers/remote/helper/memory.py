"""Memory of a helper: the arena by passed descriptors, and staging of its own."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Sequence

import numpy as np

from kvhearth.model import U8, Records, checksum_of
from kvhearth.native.blocks import address_of, block_mover
from kvhearth.shared_memory import MADV_POPULATE_WRITE, SharedMapping, advise
from kvhearth_server.tiers.base import Corrupt, Done, Outcome
from kvhearth_server.tiers.remote.record import (
    Doubt,
    Head,
    Name,
    payload_offset,
    read_head,
    record_bytes,
    write_head,
)

_HUGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000
_SOURCE = Corrupt("source")


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


class _Copier:
    """Copies shards of one length and checksums them in the same pass."""

    def __init__(self, length: int) -> None:
        # Pages one byte apart are addresses.
        self._mover = block_mover([(0, 1, length)])

    def copy(self, shard: U8, slot: U8, *, to_slot: bool) -> bytes:
        """Copy a shard into its slot, or back; return the checksum of its bytes."""
        if self._mover is not None:
            at, slot_at = address_of(shard), address_of(slot)
            found = self._mover.move_one(at, slot_at, to_slot=to_slot, sums=True)
            assert found is not None
            return found
        if to_slot:
            slot[:] = shard
            return checksum_of(shard.data)
        shard[:] = slot
        return checksum_of(shard.data)


class Memory:
    """The arena's regions and the staging memory. Its methods may run in any thread.

    Args:
        regions: descriptor and size of each arena segment; the descriptors are left open, since
            the locks that they bear tell the daemon who maps the arena.
    """

    def __init__(self, regions: Sequence[tuple[int, int]], staging_bytes: int) -> None:
        self._regions = [np.asarray(SharedMapping(fd, size)) for fd, size in regions]
        self._staging = _staging(staging_bytes)
        self._copiers: dict[int, _Copier] = {}

    @property
    def staging(self) -> memoryview:
        """The staging memory."""
        return self._staging.data

    def staged(self, offset: int, size: int) -> U8:
        """Return a place in staging."""
        return self._staging[offset : offset + size]

    def _slots(self, places: Records, length: int) -> list[U8]:
        found = []
        for region, offset in zip(
            places["region"].tolist(), places["offset"].tolist(), strict=True
        ):
            slot = self._regions[region][offset : offset + length]
            if len(slot) != length:
                raise ValueError(f"a place at {offset} is outside region {region}")
            found.append(slot)
        return found

    def stage(self, name: Name, head: Head, places: Records, into: U8) -> Outcome:
        """Copy a block from its slots to staging and make its record.

        Returns:
            ``Done``, or ``Corrupt`` if a slot does not have the bytes of its checksum.
        """
        write_head(into, name, head)
        wanted = [each.tobytes() for each in head.checksums]
        return Done() if self._copy(name, into, places, to_slots=False) == wanted else _SOURCE

    def unstage(self, name: Name, record: U8, places: Records) -> Head | Doubt:
        """Copy a record's block to its slots and verify it; return its header. After a doubt the
        slots' bytes are undefined.
        """
        head = read_head(record, name)
        if isinstance(head, Doubt):
            return head
        wanted = [each.tobytes() for each in head.checksums]
        return head if self._copy(name, record, places, to_slots=True) == wanted else Doubt.TORN

    def _copy(self, name: Name, record: U8, places: Records, *, to_slots: bool) -> list[bytes]:
        length = name.family.length
        copier = self._copiers.get(length)
        if copier is None:
            copier = self._copiers[length] = _Copier(length)
        pairs = zip(_shards(record, name), self._slots(places, length), strict=True)
        return [copier.copy(*each, to_slot=to_slots) for each in pairs]


def _shards(record: U8, name: Name) -> list[U8]:
    family = name.family
    start = payload_offset(family.shards)
    assert len(record) == record_bytes(family)
    ends = range(start, len(record) + 1, family.length)
    return [record[at : at + family.length] for at in ends[: family.shards]]
