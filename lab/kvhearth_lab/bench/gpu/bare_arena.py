"""An arena without a daemon: memory of a chosen kind of pages, and extents in it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Mapping

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.memory_limits import memory_groups
from kvhearth.model import EXTENT_DTYPE, I64, U8, U32, Records, checksum_of
from kvhearth.prefault import Unpopulated

HUGEPAGE_BYTES = 2 << 20
PAGE_KINDS = ("4k", "thp", "hugetlb")
"""Kinds of pages: base pages, transparent huge pages, and those of hugetlbfs."""
SLOT_BYTES_MIN = 4096
BOOT_ID = "bench"
_SEGMENT = 0
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _POPULATE_WRITE = 14, 15, 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class BareArena:
    """One segment of a memfd, each page of it touched; an ``ArenaView``.

    Args:
        size_bytes: rounded up to 2 MiB.
        pages: one of ``PAGE_KINDS``. Transparent huge pages are only asked for: the kernel's
            ``shmem_enabled`` decides (``huge_bytes``).

    Raises:
        KVHearthError: ``memory_unavailable`` if the machine does not have that memory.
    """

    def __init__(self, size_bytes: int, pages: str = "4k") -> None:
        self.boot_id = BOOT_ID
        self.size_bytes = -(-size_bytes // HUGEPAGE_BYTES) * HUGEPAGE_BYTES
        self.segments: Mapping[int, int] = {_SEGMENT: self.size_bytes}
        self.unpopulated = Unpopulated()
        self._living = True
        self._map = _mapped(self.size_bytes, pages)
        self._bytes: U8 = np.frombuffer(self._map, np.uint8)
        self._touch(pages)
        self._live: U32 = np.ones(self.size_bytes // SLOT_BYTES_MIN, np.uint32)
        self.generations: U32 = self._live.view()
        self.generations.flags.writeable = False

    def _touch(self, pages: str) -> None:
        address = self.address(_SEGMENT)
        advice = {"thp": _MADV_HUGEPAGE, "4k": _MADV_NOHUGEPAGE}.get(pages)
        if advice is not None:
            _libc.madvise(address, self.size_bytes, advice)
        if not _libc.madvise(address, self.size_bytes, _POPULATE_WRITE):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise _no_memory(self.size_bytes, pages, os.strerror(code))
        self._bytes[:: mmap.PAGESIZE] = 0  # before Linux 5.14

    def view(self, segment: int) -> U8:
        assert segment == _SEGMENT
        return self._bytes

    def address(self, segment: int) -> int:
        assert segment == _SEGMENT
        return int(self._bytes.ctypes.data)

    def alive(self) -> bool:
        return self._living

    def end_life(self) -> None:
        """Look like the arena of a daemon that died."""
        self._living = False

    def bump(self, slots: I64) -> None:
        """Bump the generations of slots, as when they are freed."""
        self._live[slots] += 1

    def extents(self, slots: I64, slot_bytes: int) -> Records:
        """Return extents of slots of ``slot_bytes`` each, as a daemon would grant them now.

        Raises:
            KVHearthError: ``bad_extents`` if a slot lies outside the arena.
        """
        slots = np.asarray(slots, np.int64)
        if len(slots) and (int(slots.max()) + 1) * slot_bytes > self.size_bytes:
            raise KVHearthError(Reason.BAD_EXTENTS, f"slot {slots.max()} lies outside the arena")
        records = np.zeros(len(slots), EXTENT_DTYPE)
        records["slot"] = slots
        records["segment"] = _SEGMENT
        records["offset"] = slots * slot_bytes
        records["length"] = slot_bytes
        records["generation"] = self.generations[slots]
        return records

    def slot(self, extent: Records) -> U8:
        """Return the bytes of one extent."""
        start = int(extent["offset"])
        return self._bytes[start : start + int(extent["length"])]

    def with_checksums(self, extents: Records, flags: int) -> Records:
        """Return the extents as a lookup does: with flags and the checksums of their bytes."""
        records = extents.copy()
        digests = b"".join(checksum_of(self.slot(extent).data) for extent in extents)
        records["checksum"] = np.frombuffer(digests, records.dtype["checksum"])
        records["flags"] = flags
        return records

    def huge_bytes(self) -> int:
        """Return the bytes of this arena that the kernel maps by huge pages."""
        begin = f"{self.address(_SEGMENT):x}-"
        names = ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
        kib = 0
        inside = False
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                head = line.partition(" ")[0]
                if "-" in head and not head.endswith(":"):
                    inside = line.startswith(begin)
                elif inside and head[:-1] in names:
                    kib += int(line.split()[1])
        return kib * 1024


def _mapped(size_bytes: int, pages: str) -> mmap.mmap:
    flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if pages == "hugetlb" else 0)
    descriptor = -1
    try:
        descriptor = os.memfd_create("kvhearth-bench", flags)
        os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        raise _no_memory(size_bytes, pages, str(error)) from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _no_memory(size_bytes: int, pages: str, problem: str) -> KVHearthError:
    return KVHearthError(
        Reason.MEMORY_UNAVAILABLE, f"no {size_bytes} bytes in pages of {pages}: {problem}"
    )


def spare_bytes() -> int:
    """Return the memory that a benchmark may take: two thirds of what this machine, or the control
    group of this process, has left.
    """
    limits = (each for group in memory_groups() for each in group.limits())
    left = [_meminfo("MemAvailable"), *(each.free_bytes for each in limits)]
    return min(left) * 2 // 3


def _meminfo(name: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = next((line for line in lines if line.startswith(f"{name}:")), f"{name}: 0")
    return int(found.split()[1]) * 1024
