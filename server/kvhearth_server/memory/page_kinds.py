"""Detection of the page kinds that this machine offers, and of a path's file system.

``KernelMemory`` is the only access to ``/proc`` and ``/sys`` here; tests give it another root.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.config.value_types import format_size

GIB = 1 << 30
MIB = 1 << 20
BASE_PAGE_BYTES = mmap.PAGESIZE

_TMPFS_MAGIC = 0x01021994
_HUGETLBFS_MAGIC = 0x958458F6

_THP_DIRECTORY = "sys/kernel/mm/transparent_hugepage"
_SHMEM_ENABLED = f"{_THP_DIRECTORY}/shmem_enabled"
_THP_ON = frozenset({"always", "within_size", "advise", "force"})
THP_FIX = f"run: echo advise > /{_SHMEM_ENABLED}"


class PageKind(enum.StrEnum):
    """The kind of pages behind a segment, best first."""

    HUGE_1G = "hugetlb-1GiB"
    HUGE_2M = "hugetlb-2MiB"
    THP = "thp"
    BASE = "4KiB"

    @property
    def is_hugetlb(self) -> bool:
        """True for pages from the reserved pools, which cannot be taken away or swapped."""
        return self in (PageKind.HUGE_1G, PageKind.HUGE_2M)


class HugepagePolicy(enum.StrEnum):
    """Policy for huge pages.

    ``require``: hugetlb pages or an error; ``prefer``: the best available; ``off``: 4 KiB pages.
    """

    REQUIRE = "require"
    PREFER = "prefer"
    OFF = "off"


class FilesystemKind(enum.StrEnum):
    """Kinds of file systems that the memory code distinguishes."""

    HUGETLBFS = "hugetlbfs"
    TMPFS = "tmpfs"
    OTHER = "other"


@dataclass(frozen=True)
class Filesystem:
    """A mounted file system: its kind, page size, sizes and (tmpfs only) ``huge=`` option."""

    kind: FilesystemKind
    page_bytes: int
    free_bytes: int
    total_bytes: int
    huge_option: str = "never"


@dataclass(frozen=True)
class HugePool:
    """One pool of reserved huge pages, in pages; ``free`` excludes pages promised already."""

    page_bytes: int
    total: int
    free: int

    def fix(self, needed: int, *, is_default: bool) -> str:
        """The command that makes ``needed`` pages free."""
        target = self.total + max(needed - self.free, 0)
        if self.page_bytes >= GIB:
            return (
                f"boot with 'hugepagesz=1G hugepages={target}' on the kernel's command line, "
                f"or run: echo {target} > /{_pool_directory(self.page_bytes)}/nr_hugepages"
            )
        if is_default:
            return f"run: sysctl -w vm.nr_hugepages={target}"
        return f"run: echo {target} > /{_pool_directory(self.page_bytes)}/nr_hugepages"


class KernelMemory:
    """Reads the kernel's figures on memory below ``root`` (``/`` except in tests)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def pool(self, page_bytes: int) -> HugePool:
        """The pool of huge pages of ``page_bytes``; empty if the kernel has no such pool."""
        directory = _pool_directory(page_bytes)

        def number(name: str) -> int:
            return int(self._text(f"{directory}/{name}") or "0")

        overcommit = max(number("nr_overcommit_hugepages") - number("surplus_hugepages"), 0)
        free = max(number("free_hugepages") - number("resv_hugepages"), 0) + overcommit
        return HugePool(page_bytes, number("nr_hugepages"), free)

    def pool_shortage(self, page_bytes: int, needed: int) -> str:
        """A sentence with the number of free pages, the number of needed pages, and the fix."""
        pool = self.pool(page_bytes)
        fix = pool.fix(needed, is_default=page_bytes == self.default_hugepage_bytes())
        return f"{pool.free} of {needed} pages of {format_size(page_bytes)} are free; {fix}"

    def default_hugepage_bytes(self) -> int:
        """The size of the pages that ``vm.nr_hugepages`` counts; 0 if there are none."""
        return self._meminfo_bytes("Hugepagesize") or 0

    def thp_bytes(self) -> int:
        """The size of a transparent huge page."""
        return int(self._text(f"{_THP_DIRECTORY}/hpage_pmd_size") or 2 * MIB)

    def shmem_thp(self) -> str:
        """The setting for memfds: always, within_size, advise, never, deny or force."""
        setting = self._chosen(_SHMEM_ENABLED)
        if setting in ("deny", "force"):
            return setting
        # Since Linux 6.10 each size has a switch of its own, which overrides the old one.
        kib = self.thp_bytes() // 1024
        own = self._chosen(f"{_THP_DIRECTORY}/hugepages-{kib}kB/shmem_enabled")
        return setting if own in ("", "inherit") else own

    def memfd_thp_allowed(self) -> bool:
        """Whether MADV_HUGEPAGE has an effect on a memfd (not with the kernel's default)."""
        return self.shmem_thp() in _THP_ON

    def tmpfs_thp_allowed(self, filesystem: Filesystem) -> bool:
        """Whether MADV_HUGEPAGE has an effect there; a mounted tmpfs has its own option."""
        setting = self._chosen(_SHMEM_ENABLED)
        if setting in ("deny", "force"):
            return setting == "force"
        return filesystem.huge_option in _THP_ON

    def available_bytes(self) -> int | None:
        """Memory that can be taken without swapping or an OOM kill; None if unknown.

        This is the minimum of MemAvailable and the room left by the limits of this process's
        control group (v2) and its parents. MemAvailable alone is the host's, even inside a
        container.
        """
        figures = [self._meminfo_bytes("MemAvailable"), *self._cgroup_room()]
        known = [figure for figure in figures if figure is not None]
        return min(known) if known else None

    def pmd_mapped_bytes(self, address: int) -> int:
        """Bytes of this process's mapping at ``address`` that are in transparent huge pages."""
        inside = False
        for line in (self._text("proc/self/smaps") or "").splitlines():
            word = line.split(maxsplit=1)[0] if line else ""
            if "-" in word and not word.endswith(":"):
                start, end = (int(part, 16) for part in word.split("-"))
                inside = start <= address < end
            elif inside and word == "ShmemPmdMapped:":
                return int(line.split()[1]) * 1024
        return 0

    def _cgroup_room(self) -> list[int]:
        own = next(
            (
                line[3:]
                for line in (self._text("proc/self/cgroup") or "").splitlines()
                if line.startswith("0::")
            ),
            "/",
        )
        top = Path("sys/fs/cgroup")
        group = top / own.lstrip("/")
        rooms: list[int] = []
        while group == top or top in group.parents:
            limit = self._text(str(group / "memory.max"))
            if limit and limit != "max":
                used = int(self._text(str(group / "memory.current")) or "0")
                rooms.append(max(int(limit) - used + self._page_cache_bytes(group), 0))
            group = group.parent
        return rooms

    def _page_cache_bytes(self, group: Path) -> int:
        """Bytes that the group would release under pressure (file pages, not shared memory)."""
        rows = (
            line.split() for line in (self._text(str(group / "memory.stat")) or "").splitlines()
        )
        return sum(int(row[1]) for row in rows if row[0] in ("active_file", "inactive_file"))

    def _meminfo_bytes(self, name: str) -> int | None:
        for line in (self._text("proc/meminfo") or "").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return None

    def _chosen(self, relative: str) -> str:
        """The word in brackets of a file such as ``always [never] deny``."""
        text = self._text(relative) or ""
        return text.partition("[")[2].partition("]")[0]

    def _text(self, relative: str) -> str | None:
        try:
            return (self._root / relative).read_text().strip()
        except OSError:
            return None


class _StatFs(ctypes.Structure):
    """``struct statfs`` of the 64-bit Linux platforms, as far as it is needed."""

    _fields_ = (
        ("f_type", ctypes.c_long),
        ("f_bsize", ctypes.c_long),
        ("f_blocks", ctypes.c_ulong),
        ("f_bfree", ctypes.c_ulong),
        ("f_bavail", ctypes.c_ulong),
        ("rest", ctypes.c_char * 256),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def filesystem_kind(path: Path) -> Filesystem:
    """The file system that ``path`` (an existing file or directory) is on.

    Raises:
        OSError: ``path`` does not exist or cannot be reached.
    """
    facts = _StatFs()
    if _libc.statfs(os.fsencode(path), ctypes.byref(facts)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    magic = facts.f_type & 0xFFFFFFFF
    block_bytes = int(facts.f_bsize)
    free, total = int(facts.f_bavail) * block_bytes, int(facts.f_blocks) * block_bytes
    if magic == _HUGETLBFS_MAGIC:
        return Filesystem(FilesystemKind.HUGETLBFS, block_bytes, free, total)
    if magic == _TMPFS_MAGIC:
        # A tmpfs without a size limit reports 0 blocks: total_bytes is 0 then.
        option = _huge_option(path)
        return Filesystem(FilesystemKind.TMPFS, BASE_PAGE_BYTES, free, total, option)
    return Filesystem(FilesystemKind.OTHER, BASE_PAGE_BYTES, free, total)


def _huge_option(path: Path) -> str:
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[2] != wanted:
            continue
        for option in line.split()[-1].split(","):
            if option.startswith("huge="):
                return option.removeprefix("huge=")
    return "never"


def _pool_directory(page_bytes: int) -> str:
    return f"sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
