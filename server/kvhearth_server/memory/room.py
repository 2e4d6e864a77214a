"""Memory that an arena takes: one computation for the daemon, ``doctor`` and the documents."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.durable_file import file_bytes
from kvhearth_server.memory.journal import journal_bytes, journal_path
from kvhearth_server.memory.page_kinds import (
    MIB,
    Filesystem,
    FilesystemKind,
    HugepagePolicy,
    KernelMemory,
    filesystem_kind,
)
from kvhearth_server.memory.plan import (
    CATALOGUE_BYTES_MAX,
    CATALOGUE_NAME,
    JOURNALS,
    RESIZED_NAME,
    ArenaPlan,
    Found,
    Step,
    examine,
    segment_path,
)
from kvhearth_server.memory.segments import HUGE_BYTES, check_memory, check_place
from kvhearth_server.ownership import foreign


@dataclass(frozen=True)
class Room:
    """Bytes that an arena takes, in whole pages; the last two are 0 without a directory."""

    segments: int
    journal: int
    catalogue: int

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return self.segments + self.journal + self.catalogue

    def __str__(self) -> str:
        parts = [f"{format_size(self.segments)} of memory"]
        if self.catalogue:
            parts += [f"{format_size(self.journal)} of journal"]
            parts += [f"{format_size(self.catalogue)} of catalogue"]
        return ", ".join(parts)


def room_of(geometry: Geometry, filesystem: Filesystem | None) -> Room:
    """Compute the room of an arena on a file system, or of an anonymous one."""
    segments = sum(geometry.segment_bytes(i) for i in range(len(geometry.segments)))
    if filesystem is None:
        return Room(segments, 0, 0)
    journal = journal_bytes(geometry, journal_page_bytes(filesystem))
    return Room(segments, journal, file_bytes(CATALOGUE_BYTES_MAX, filesystem))


def journal_page_bytes(filesystem: Filesystem) -> int:
    """Unit of a journal file's size, in bytes."""
    return max(2 * MIB, filesystem.page_bytes)


def check_room(plan: ArenaPlan, kernel: KernelMemory) -> Found:
    """Refuse a plan that the machine has no place or memory for; nothing is changed.

    Raises:
        KVHearthError: ``ARENA_UNUSABLE``, ``MEMORY_UNAVAILABLE``, ``HUGEPAGES_UNAVAILABLE``.
    """
    if plan.folder is None:
        _check_anonymous(plan, kernel)
        return Found(Step.COLD)
    place = plan.folder if os.path.lexists(plan.folder) else plan.folder.parent
    if not os.path.isdir(place):
        raise KVHearthError(
            Reason.ARENA_UNUSABLE, f"arena_dir: {place} is no directory; create it or mount it"
        )
    try:
        message = foreign(place) if place is plan.folder else _unmakeable(place)
        filesystem = filesystem_kind(place)
    except OSError as error:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"cannot use arena_dir {plan.folder} ({error.strerror}); "
            "give a directory that the daemon may read and write",
        ) from error
    if message:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"cannot use arena_dir {plan.folder}: {message}; give a directory of the daemon's own",
        )
    check_place(plan.folder, filesystem, plan.hugepages)
    found = examine(plan, plan.folder)
    if plan.keep_s and found.step is Step.COLD:
        _check_anonymous(plan, kernel)
    _check_files(plan, plan.folder, filesystem, found, kernel)
    return found


def _unmakeable(parent: Path) -> str:
    return "" if os.access(parent, os.W_OK | os.X_OK) else "it is missing and cannot be made"


def _check_anonymous(plan: ArenaPlan, kernel: KernelMemory) -> None:
    """Check the plan by giving each segment the best pages that are left, as the daemon does."""
    geometry = plan.geometry
    kinds = {} if plan.hugepages is HugepagePolicy.OFF else HUGE_BYTES
    free = {size: kernel.pool(size).free for size in kinds.values()}
    small = 0
    for index in range(len(geometry.segments)):
        size = geometry.segment_bytes(index)
        fits = [page for page in free if size % page == 0 and size // page <= free[page]]
        if fits:
            free[fits[0]] -= size // fits[0]
        else:
            small += size
    if small and plan.hugepages is HugepagePolicy.REQUIRE:
        pages = room_of(geometry, None).bytes // (2 * MIB)
        raise KVHearthError(
            Reason.HUGEPAGES_UNAVAILABLE,
            f"huge pages are required: {kernel.pool_shortage(2 * MIB, pages)}",
        )
    check_memory(kernel, small)


def _check_files(
    plan: ArenaPlan, folder: Path, filesystem: Filesystem, found: Found, kernel: KernelMemory
) -> None:
    """Compare the files to be made or extended with the space that is left."""
    room = room_of(plan.geometry, filesystem)
    if plan.keep_s:
        room = replace(room, segments=0)
    missing = _missing(plan, folder, room, found)
    if filesystem.kind is not FilesystemKind.HUGETLBFS:
        check_memory(kernel, missing)
        if filesystem.total_bytes and missing > filesystem.free_bytes:
            raise KVHearthError(
                Reason.MEMORY_UNAVAILABLE,
                f"the arena takes {format_size(missing)} more ({room}), the tmpfs of {folder} has "
                f"{filesystem.free_bytes // MIB}MiB free; ask for less, or enlarge it",
            )
        return
    page_bytes = filesystem.page_bytes
    needed = -(-missing // page_bytes)
    pool = kernel.pool(page_bytes)
    what = f"the arena in {folder} takes {room.bytes // page_bytes} pages ({room})"
    if needed > pool.free:
        raise KVHearthError(
            Reason.HUGEPAGES_UNAVAILABLE,
            f"{what}, {needed} of them new, and nothing but pages can be had there: "
            f"{kernel.pool_shortage(page_bytes, needed)}, or give an --arena-dir on tmpfs",
            needed_pages=str(needed),
            free_pages=str(pool.free),
            page_bytes=str(page_bytes),
        )
    if filesystem.total_bytes and missing > filesystem.free_bytes:
        raise KVHearthError(
            Reason.HUGEPAGES_UNAVAILABLE,
            f"{what}, its mount has room for {filesystem.free_bytes // page_bytes} more; mount it "
            "with a larger size=",
        )


def _missing(plan: ArenaPlan, folder: Path, room: Room, found: Found) -> int:
    """Bytes to be allocated for the files before any file that a crash would need is deleted."""
    if found.step is Step.COLD:
        return max(room.bytes - _taken(*_files(folder)), 0)
    journal = journal_path(folder)
    if found.step is Step.RESIZE or not journal.exists():
        journal = folder / RESIZED_NAME  # the new one, made while the old one stays
    segments = [segment_path(folder, i) for i in range(len(plan.geometry.segments))]
    missing = max(room.journal - _taken(journal), 0)
    missing += max(room.catalogue - _taken(folder / CATALOGUE_NAME), 0)
    for index, path in enumerate([] if plan.keep_s else segments):
        missing += max(plan.geometry.segment_bytes(index) - _taken(path), 0)
    return missing


def _taken(*paths: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())


def _files(folder: Path) -> list[Path]:
    """The files of an arena, including half-made ones; a cold start deletes or reuses all."""
    names = (CATALOGUE_NAME, f"{CATALOGUE_NAME}.new", *JOURNALS, *(f"{n}.new" for n in JOURNALS))
    return [*folder.glob("segment-*"), *(folder / name for name in names)]
