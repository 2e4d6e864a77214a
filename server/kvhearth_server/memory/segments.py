"""Segments: shared memory of the best pages available.

``create_segment`` reports every step down; ``open_segment`` maps a file that an earlier daemon
left. Both populate all of it, so that no later touch can end in a SIGBUS or in the OOM killer, or
leave that to their caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth.memory_limits import MemoryLimit, tightest
from kvhearth.shared_memory import SharedMapping
from kvhearth_server.config.value_types import format_size
from kvhearth_server.memory.mapping import (
    BASE_PAGE_BYTES,
    GIB,
    MIB,
    Filesystem,
    FilesystemKind,
    HugepagePolicy,
    KernelMemory,
    PageKind,
    PageSource,
    Segment,
    closed_on_failure,
    filesystem_kind,
    make_memfd,
    map_file,
    seal,
)
from kvhearth_server.memory.numa import Placement
from kvhearth_server.memory.pages import HugetlbPages, PlainPages
from kvhearth_server.ownership import foreign

HUGE_BYTES = {PageKind.HUGE_1G: GIB, PageKind.HUGE_2M: 2 * MIB}
"""Sizes of hugetlb pages, best first."""
_MFD_HUGE_SHIFT = 26
_NO_ROOM = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EDQUOT})


def create_segment(
    bytes: int,
    policy: HugepagePolicy,
    *,
    path: Path | None = None,
    populated: bool = True,
    kernel: KernelMemory | None = None,
    placement: Placement | None = None,
) -> Segment:
    """Make a zeroed segment of ``bytes``: a new file at ``path``, or a memfd.

    The file appears under its name only when it is complete; a file that a killed daemon left
    half-made is removed. A memfd is sealed against resizing, so that no client can truncate it
    while the daemon uses it.

    Args:
        bytes: a multiple of the page size (with ``OFF`` 4 KiB, else 2 MiB, or that of the hugetlbfs
            which ``path`` is on).
        policy: ``REQUIRE`` takes hugetlb pages only, ``OFF`` 4 KiB pages only.
        path: a file that does not exist, on hugetlbfs or tmpfs.
        populated: take all pages now; else the caller does, by ``Segment.populate``.
        kernel: source of the figures on free memory (tests).
        placement: partition among NUMA nodes; without one the segment is one part.

    Raises:
        KVHearthError: ``HUGEPAGES_UNAVAILABLE``, ``MEMORY_UNAVAILABLE``, or ``ARENA_UNUSABLE`` (the
            size is wrong, or the place is not suitable for an arena).
    """
    maker = _Maker(bytes, policy, populated, kernel or KernelMemory(), placement)
    return maker.memfd() if path is None else maker.file(path)


def open_segment(
    place: Path | int,
    policy: HugepagePolicy = HugepagePolicy.PREFER,
    *,
    size_bytes: int | None = None,
    populated: bool = True,
    kernel: KernelMemory | None = None,
    placement: Placement | None = None,
) -> Segment:
    """Map an existing segment and populate it; its contents do not change.

    ``place`` is its file, or a sealed memfd of an earlier daemon, which the segment takes over.
    ``policy`` refuses and warns as in ``create_segment``. ``page_kind`` is the kind found. If the
    file is longer than ``size_bytes``, its first part is mapped; if it is shorter, it is extended,
    or left as it was if that fails. By default all of it is mapped.

    Raises:
        KVHearthError: ``ARENA_UNUSABLE`` (no such file, not a segment's file or file system),
            ``MEMORY_UNAVAILABLE`` or ``HUGEPAGES_UNAVAILABLE`` (it has holes that cannot be filled,
            or it contradicts ``policy``).
    """
    kernel = kernel or KernelMemory()
    if isinstance(place, int):
        with closed_on_failure(place):
            size_bytes = size_bytes or os.fstat(place).st_size
            return _Maker(size_bytes, policy, populated, kernel, placement).adopt_memfd(place)
    path = place
    try:
        filesystem = filesystem_kind(path.parent)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _unusable(path, error) from error
    with closed_on_failure(fd):
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size == 0:
            raise KVHearthError(Reason.ARENA_UNUSABLE, f"{path} is no segment; remove it")
        if message := foreign(fd):
            raise KVHearthError(Reason.ARENA_UNUSABLE, f"cannot use {path}: {message}; remove it")
        wanted = size_bytes or facts.st_size
        maker = _Maker(wanted, policy, populated, kernel, placement)
        with contextlib.ExitStack() as undo:
            if wanted > facts.st_size:
                undo.callback(os.ftruncate, fd, facts.st_size)
            segment = maker.adopt(fd, path, filesystem, facts)
            undo.pop_all()
            return segment


def check_place(folder: Path, filesystem: Filesystem, policy: HugepagePolicy) -> None:
    """Refuse a directory that is no place for an arena, or contradicts the policy.

    Raises:
        KVHearthError: ``ARENA_UNUSABLE``, ``HUGEPAGES_UNAVAILABLE``.
    """
    if filesystem.kind is FilesystemKind.OTHER:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"{folder} is neither on hugetlbfs nor on tmpfs, and the arena is memory; "
            "give a directory such as /dev/hugepages/kvhearth or /dev/shm/kvhearth",
        )
    if filesystem.kind is FilesystemKind.TMPFS:
        if policy is HugepagePolicy.REQUIRE:
            raise KVHearthError(
                Reason.HUGEPAGES_UNAVAILABLE,
                f"huge pages are required, but {folder} is on tmpfs; "
                "give a directory on hugetlbfs, such as /dev/hugepages/kvhearth",
            )
        return
    if filesystem.page_bytes not in HUGE_BYTES.values():
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"{folder} has pages of {format_size(filesystem.page_bytes)}; "
            "mount a hugetlbfs with pagesize=2M or pagesize=1G",
        )
    if policy is HugepagePolicy.OFF:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"{folder} is on hugetlbfs, but huge pages are off; "
            "give a directory on tmpfs, or turn them on",
        )


def check_memory(limits: Iterable[MemoryLimit], needed_bytes: int, message: str = "") -> None:
    """Refuse a size that the tightest of the limits has no room for; ``message`` ends the message.

    Raises:
        KVHearthError: ``MEMORY_UNAVAILABLE``.
    """
    least = tightest(limits)
    if least is not None and needed_bytes > least.free_bytes:
        raise _no_memory(needed_bytes, least, message)


def _no_memory(needed_bytes: int, least: MemoryLimit, message: str) -> KVHearthError:
    others = least.bytes - least.free_bytes if needed_bytes <= least.bytes else 0
    what = f", of which others have {others // MIB}MiB; free those, " if others else "; "
    return KVHearthError(
        Reason.MEMORY_UNAVAILABLE,
        f"{format_size(needed_bytes)} of memory are asked for, {least.free_bytes // MIB}MiB "
        f"are available by {least.name}{what}ask for less or raise that limit{message}",
        needed_bytes=str(needed_bytes),
        available_bytes=str(least.free_bytes),
    )


def no_hugepages(
    kernel: KernelMemory, page_bytes: int, needed_bytes: int, before: str = "", after: str = ""
) -> KVHearthError:
    """Return the refusal for a lack of huge pages, with the number of free ones and the fix;
    ``before`` and ``after`` begin and end its message.
    """
    needed = -(-needed_bytes // page_bytes)
    return KVHearthError(
        Reason.HUGEPAGES_UNAVAILABLE,
        before + kernel.pool_shortage(page_bytes, needed) + after,
        needed_pages=str(needed),
        free_pages=str(kernel.pool(page_bytes).free),
        page_bytes=str(page_bytes),
    )


class _Maker:
    """One attempt to get a segment: the request, and the steps down so far."""

    def __init__(
        self,
        size_bytes: int,
        policy: HugepagePolicy,
        populated: bool,
        kernel: KernelMemory,
        placement: Placement | None,
    ) -> None:
        self._bytes = size_bytes
        self._placement = placement
        self._policy = HugepagePolicy(policy)
        self._populated = populated
        self._kernel = kernel
        self._steps: list[str] = []
        self._adopts = False

    def memfd(self) -> Segment:
        self._check_size(BASE_PAGE_BYTES if self._off else 2 * MIB)
        if not self._off:
            for kind, page_bytes in HUGE_BYTES.items():
                if self._bytes % page_bytes == 0 and (found := self._hugetlb_memfd(kind)):
                    return found
        if self._policy is HugepagePolicy.REQUIRE:
            raise self._no_hugepages(2 * MIB)
        check_memory(self._kernel.limits(), self._bytes, self._message())
        fd = make_memfd("kvhearth", self._bytes)
        with closed_on_failure(fd):
            seal(fd)
            return self._plain(fd, None)

    def file(self, path: Path) -> Segment:
        try:
            filesystem = filesystem_kind(path.parent)
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, "it exists already", str(path))
        except OSError as error:
            raise _unusable(path, error) from error
        hugetlb = filesystem.kind is FilesystemKind.HUGETLBFS
        self._check_size(filesystem.page_bytes if hugetlb or self._off else 2 * MIB)
        self._check_place(path, filesystem, self._bytes)
        fresh = path.with_name(path.name + ".new")
        try:
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        with closed_on_failure(fd) as undo:
            undo.callback(fresh.unlink, missing_ok=True)
            os.ftruncate(fd, self._bytes)
            segment = self._fill(fd, path, filesystem)
            fresh.rename(path)
            return segment

    def adopt(self, fd: int, path: Path, filesystem: Filesystem, facts: os.stat_result) -> Segment:
        self._adopts = True
        self._check_size(filesystem.page_bytes)
        missing = max(self._bytes - facts.st_blocks * 512, 0) if self._populated else 0
        self._check_place(path, filesystem, missing)
        if self._bytes > facts.st_size:
            os.ftruncate(fd, self._bytes)
        return self._fill(fd, path, filesystem)

    def adopt_memfd(self, fd: int) -> Segment:
        self._adopts = True
        page_bytes = os.fstatvfs(fd).f_bsize
        if page_bytes not in HUGE_BYTES.values():
            return self._plain(fd, None)
        return self._adopt_hugetlb(fd, page_bytes, None)

    @property
    def _off(self) -> bool:
        return self._policy is HugepagePolicy.OFF

    def _fill(self, fd: int, path: Path, filesystem: Filesystem) -> Segment:
        if filesystem.kind is FilesystemKind.TMPFS:
            return self._plain(fd, path)
        return self._adopt_hugetlb(fd, filesystem.page_bytes, path)

    def _adopt_hugetlb(self, fd: int, page_bytes: int, path: Path | None) -> Segment:
        kind = PageKind.HUGE_1G if page_bytes == GIB else PageKind.HUGE_2M
        try:
            return self._hugetlb(fd, kind, path)
        except OSError as error:
            if path is not None and error.errno not in _NO_ROOM:
                raise _unusable(path, error) from error
            raise self._no_hugepages(page_bytes) from error

    def _hugetlb_memfd(self, kind: PageKind) -> Segment | None:
        page_bytes = HUGE_BYTES[kind]
        try:
            # OSError also from a kernel without pages of this size, or without hugetlb.
            flags = os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT
            fd = make_memfd("kvhearth", self._bytes, flags)
            with closed_on_failure(fd):
                seal(fd)
                return self._hugetlb(fd, kind, None)
        except OSError:
            pass
        shortage = self._kernel.pool_shortage(page_bytes, self._bytes // page_bytes)
        self._steps.append(f"no {format_size(page_bytes)} pages: {shortage}")
        return None

    def _hugetlb(self, fd: int, kind: PageKind, path: Path | None) -> Segment:
        page_bytes = HUGE_BYTES[kind]
        mapping = map_file(fd, self._bytes, page_bytes)
        return self._segment(fd, mapping, HugetlbPages(kind, page_bytes, self._bytes), path)

    def _plain(self, fd: int, path: Path | None) -> Segment:
        """Give ``fd`` transparent huge pages where it may have some, else small pages."""
        if path is not None and not self._off:
            self._steps.append(
                f"no hugetlb pages: {path.parent} is on tmpfs; give a directory on hugetlbfs"
            )
        huge_bytes = BASE_PAGE_BYTES if self._off else self._kernel.thp_bytes()
        try:
            mapping = map_file(fd, self._bytes, huge_bytes)
            folder = None if path is None else path.parent
            source = PlainPages(fd, mapping, self._kernel, huge=not self._off, folder=folder)
            return self._segment(fd, mapping, source, path)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            limits = self._kernel.limits()
            if path is not None:
                limits += filesystem_kind(path.parent).limits(path.parent)
            least = tightest(limits) or MemoryLimit("an unknown limit", 0, 0)
            message = f" ({error.strerror}){self._message()}"
            raise _no_memory(self._bytes, least, message) from error

    def _segment(
        self, fd: int, mapping: SharedMapping, source: PageSource, path: Path | None
    ) -> Segment:
        made = Segment(fd, mapping, source, path=path, steps_down=self._steps)
        if self._placement is not None:
            if note := self._placement.prefer(mapping.address, self._bytes):
                self._steps.append(note)
            made.nodes = self._placement.nodes_of(mapping.address, self._bytes, self._adopts)
        if self._populated:
            made.populate(0, made.bytes)
            made.settle(made.bytes)
        return made

    def _check_size(self, page_bytes: int) -> None:
        if self._bytes <= 0 or self._bytes % page_bytes:
            raise KVHearthError(
                Reason.ARENA_UNUSABLE,
                f"a segment of {self._bytes} bytes is not made of whole pages; "
                f"give a multiple of {format_size(page_bytes)}",
            )

    def _check_place(self, path: Path, filesystem: Filesystem, missing_bytes: int) -> None:
        """Refuse a place that cannot work or contradicts the policy, before a page is taken."""
        check_place(path.parent, filesystem, self._policy)
        if filesystem.kind is FilesystemKind.HUGETLBFS:
            return
        limits = [*self._kernel.limits(), *filesystem.limits(path.parent)]
        check_memory(limits, missing_bytes, self._message())

    def _no_hugepages(self, page_bytes: int) -> KVHearthError:
        limits = "look at the limits of the mount and of the control group"
        after = f"; where the pool has enough of them, {limits}"
        return no_hugepages(self._kernel, page_bytes, self._bytes, after=after)

    def _message(self) -> str:
        return "".join(f" [{step}]" for step in self._steps)


def _unusable(path: Path, error: OSError) -> KVHearthError:
    return KVHearthError(
        Reason.ARENA_UNUSABLE,
        f"cannot use {path} for the arena ({error.strerror}); "
        "give a directory that exists, that the daemon may write to, on hugetlbfs or tmpfs",
    )
