"""Where the pages of a segment come from, and how a part of it gets them.

Contents never change, also beside processes that read and write them.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

from kvhearth.memory_limits import MemoryLimit
from kvhearth.shared_memory import MADV_HUGEPAGE, SharedMapping
from kvhearth_server.config.value_types import format_size
from kvhearth_server.memory.mapping import (
    BASE_PAGE_BYTES,
    MIB,
    THP_FIX,
    Filesystem,
    KernelMemory,
    PageKind,
    filesystem_kind,
    populate,
)

_SPARE_BYTES = 256 * MIB
_SPARE_PARTS = 50
"""What a machine or a control group keeps beside the arena: these bytes, or this part of its limit,
whichever is less.
"""
_WHY_SMALL = {
    errno.EINVAL: "the kernel collapses none (Linux 6.1, and a shmem_enabled other than deny)",
    errno.ENOMEM: "memory is fragmented; run: echo 1 > /proc/sys/vm/compact_memory",
    errno.EBUSY: "the control group's limit of memory is reached",
    errno.EAGAIN: "some pages are in use, as those that a process pinned",
}


class HugetlbPages:
    """Pages of the reserved pools: mapping the segment has reserved all of them."""

    def __init__(self, kind: PageKind, page_bytes: int, size_bytes: int) -> None:
        self.kind, self.page_bytes, self.huge_bytes = kind, page_bytes, size_bytes

    def fill(self, address: int, size_bytes: int) -> None:
        populate(address, size_bytes, self.page_bytes)

    def settle(self, populated_bytes: int) -> str:
        return ""

    def limits(self, start: int, size_bytes: int) -> list[MemoryLimit]:
        return []


class PlainPages:
    """Transparent huge pages of a memfd or tmpfs where it may have some, else small pages.

    Args:
        fd, mapping: the file and the daemon's mapping of it.
        huge: want huge pages.
        folder: directory of the file, None for a memfd.
        kernel: source of the figures on memory.
    """

    def __init__(
        self,
        fd: int,
        mapping: SharedMapping,
        kernel: KernelMemory,
        *,
        huge: bool,
        folder: Path | None,
    ) -> None:
        self._fd, self._mapping, self._kernel, self._folder = fd, mapping, kernel, folder
        self._thp_bytes = kernel.thp_bytes()
        self._collapse = kernel.collapse() if huge else None
        self._advised = huge and self._thp_allowed()
        if self._advised:
            mapping.advise(MADV_HUGEPAGE)  # an old kernel or a container may refuse it
        self.kind = PageKind.THP if huge else PageKind.BASE
        self.page_bytes = self._thp_bytes if huge else BASE_PAGE_BYTES
        self.huge_bytes = 0

    def fill(self, address: int, size_bytes: int) -> None:
        start = address - self._mapping.address
        collapsed = self._collapse is not None and self._collapse.fill(address, size_bytes)
        if not collapsed and not self._advised:
            # Allocating first would take small pages even where huge ones are advised.
            os.posix_fallocate(self._fd, start, size_bytes)
        populate(address, size_bytes, BASE_PAGE_BYTES)
        if self._advised:  # a kernel that cannot populate for writing has left holes
            os.posix_fallocate(self._fd, start, size_bytes)

    def settle(self, populated_bytes: int) -> str:
        if self._collapse is None:
            return ""
        self.huge_bytes = self._kernel.pmd_mapped_bytes(self._mapping.address)
        if 2 * self.huge_bytes < populated_bytes:
            self.kind, self.page_bytes = PageKind.BASE, BASE_PAGE_BYTES
        whole_bytes = populated_bytes - populated_bytes % self._thp_bytes
        if self.huge_bytes >= whole_bytes:
            return ""
        return self._small(populated_bytes, self._collapse.error)

    def limits(self, start: int, size_bytes: int) -> list[MemoryLimit]:
        if os.lseek(self._fd, start, os.SEEK_HOLE) >= start + size_bytes:
            return []
        limits = [
            replace(
                each, free_bytes=each.free_bytes - min(_SPARE_BYTES, each.bytes // _SPARE_PARTS)
            )
            for each in self._kernel.page_limits()
        ]
        place = self._place()
        if place is not None and self._folder is not None:
            limits += place.limits(self._folder)
        return limits

    def _place(self) -> Filesystem | None:
        return None if self._folder is None else filesystem_kind(self._folder)

    def _thp_allowed(self) -> bool:
        """Whether MADV_HUGEPAGE makes huge pages there, so that nothing is left to collapse."""
        place = self._place()
        if place is None:
            return self._kernel.memfd_thp_allowed()
        return self._kernel.tmpfs_thp_allowed(place)

    def _small(self, populated_bytes: int, number: int) -> str:
        """Say why not all of a segment is in huge pages."""
        why = _WHY_SMALL.get(number, os.strerror(number) if number else "the kernel gave no more")
        if not self._thp_allowed():
            place = self._place()
            if place is not None:
                why += (
                    f"; that tmpfs is mounted with huge={place.huge_option}, run: mount -o "
                    "remount,huge=advise on its mount point"
                )
            else:
                why += f"; shmem_enabled is '{self._kernel.shmem_thp()}', {THP_FIX}"
        return (
            f"no transparent huge pages for all: {format_size(self.huge_bytes)} of "
            f"{format_size(populated_bytes)} are in huge pages; {why}"
        )
