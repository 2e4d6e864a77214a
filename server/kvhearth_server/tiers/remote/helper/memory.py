"""Memory of a helper: the arena by passed descriptors, and staging of its own."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Sequence

import numpy as np

from kvhearth.model import U8, checksum_of
from kvhearth.native.blocks import address_of
from kvhearth.shared_memory import MADV_POPULATE_WRITE, SharedMapping, advise
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.mover import Get, Put
from kvhearth_server.tiers.remote.record import Head, Name, Suspect, record_bytes

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
        self._views = [np.asarray(SharedMapping(fd, size)).data for fd, size in regions]
        self._sizes = np.array([len(view) for view in self._views], np.int64)
        self._least = min(self._sizes.tolist(), default=0)
        self._staging = _staging(staging_bytes)

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

    def seal(self, sealer: Sealer, request: Put, offsets: Sequence[int], row: int) -> bool:
        """Seal a block from its slots into its place in staging.

        Returns:
            Whether the slots had the bytes of its checksums; only then the record is made.
        """
        shards, checksums = self._slots(request, row), request.checksums[row].tobytes()
        if b"".join(map(checksum_of, shards)) != checksums:
            return False
        into = self.staged(offsets[row], record_bytes(request.family))
        sealer.seal(_name(request, row), request.parents[row], checksums, shards, into)
        return True

    def open(self, sealer: Sealer, request: Get, row: int, record: memoryview) -> Head | Suspect:
        """Verify a record and put its block into its slots; see ``Sealer.open``."""
        return sealer.open(_name(request, row), record, self._slots(request, row))

    def _slots(self, request: Get, row: int) -> list[memoryview]:
        """Return the bytes of a block's slots."""
        length = request.family.length
        return [
            self._views[region][offset : offset + length]
            for region, _, offset in request.places[row].tolist()
        ]


def _name(request: Get, row: int) -> Name:
    return Name(request.space, request.family, request.keys[row])
