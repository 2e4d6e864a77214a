"""Memory of a helper: the arena by passed descriptors, and staging of its own."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Sequence

import numpy as np

from kvhearth.model import U8, Records, checksum_of
from kvhearth.native.blocks import address_of, sums_at
from kvhearth.shared_memory import SharedMapping
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
    return np.frombuffer(memory, np.uint8)


def _sums(shards: Sequence[U8]) -> list[bytes]:
    lengths = np.array([len(each) for each in shards], np.int64)
    addresses = np.array([address_of(each) for each in shards], np.int64)
    if (found := sums_at(addresses, lengths)) is not None:
        return [row.tobytes() for row in found]
    return [checksum_of(each.data) for each in shards]


class Memory:
    """The arena's regions and the staging memory. Its methods may run in any thread.

    Args:
        regions: descriptor and size of each arena segment; the descriptors are left open, since
            the locks that they bear tell the daemon who maps the arena.
    """

    def __init__(self, regions: Sequence[tuple[int, int]], staging_bytes: int) -> None:
        self._regions = [np.asarray(SharedMapping(fd, size)) for fd, size in regions]
        self._staging = _staging(staging_bytes)

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
        family = name.family
        write_head(into, name, head)
        shards = _shards(into, name)
        for shard, slot in zip(shards, self._slots(places, family.length), strict=True):
            shard[:] = slot
        wanted = [each.tobytes() for each in head.checksums]
        return Done() if _sums(shards) == wanted else Corrupt("source")

    def unstage(self, name: Name, record: U8, places: Records) -> Head | Doubt:
        """Verify a record and copy its block to the slots; return its header."""
        head = read_head(record, name)
        if isinstance(head, Doubt):
            return head
        shards = _shards(record, name)
        if _sums(shards) != [each.tobytes() for each in head.checksums]:
            return Doubt.TORN
        for shard, slot in zip(shards, self._slots(places, name.family.length), strict=True):
            slot[:] = shard
        return head


def _shards(record: U8, name: Name) -> list[U8]:
    family = name.family
    start = payload_offset(family.shards)
    assert len(record) == record_bytes(family)
    ends = range(start, len(record) + 1, family.length)
    return [record[at : at + family.length] for at in ends[: family.shards]]
