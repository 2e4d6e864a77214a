"""Arena that the settings request, the step to it from the existing one, and room for both."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.descriptor_store import descriptor_store, is_sealed
from kvhearth_server.memory.durable_file import blob_bytes, peek
from kvhearth_server.memory.journal import VERSION, journal_bytes, journal_path
from kvhearth_server.memory.mapping import (
    MIB,
    Filesystem,
    FilesystemKind,
    HugepagePolicy,
    KernelMemory,
    filesystem_kind,
)
from kvhearth_server.memory.segments import HUGE_BYTES, check_memory, check_place, no_hugepages
from kvhearth_server.ownership import foreign, unwritable

CATALOGUE_FORMAT = 2
CATALOGUE_NAME = "catalogue"
CATALOGUE_BYTES_MAX = 12 << 20
"""Room for all contracts (twice, since they are quoted) and for the groups of all sessions."""
RESIZED_NAME = "journal.resized"
"""The journal of an arena that is being resized. It is valid once the catalogue names it."""


@dataclass(frozen=True)
class ArenaPlan:
    """The requested arena: tenants with whole slabs of bytes, and its directory.

    ``discard``: an arena in the directory that cannot become this one is deleted. ``keep``: the
    segments are sealed memfds in systemd's descriptor store, and not files in the directory.
    """

    geometry: Geometry
    folder: Path | None
    hugepages: HugepagePolicy
    discard: bool = False
    keep: bool = False


class Step(enum.Enum):
    """Step from the directory's content to the requested arena."""

    COLD = "make new files"
    ADOPT = "map the files"
    RESIZE = "move the blocks"


@dataclass(frozen=True)
class Found:
    """The content of an arena directory, compared with a plan.

    ``catalogue`` and ``geometry`` are the earlier run's, None for a cold start. ``lost`` are the
    segments whose memory is missing: they alone start cold. ``notes`` explain why an existing
    arena, or a segment of it, is not adopted.
    """

    step: Step
    catalogue: dict[str, Any] | None = None
    geometry: Geometry | None = None
    lost: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)


def segment_path(folder: Path, index: int) -> Path:
    """The file of a segment in an arena directory."""
    return folder / f"segment-{index}"


def arena_files(folder: Path) -> list[Path]:
    """The files of an arena, including half-made ones, the catalogue first; a cold start deletes
    all.
    """
    names = (CATALOGUE_NAME, journal_path(folder).name, RESIZED_NAME, "segment-*")
    return [path for name in names for end in ("", ".new") for path in folder.glob(name + end)]


def segment_numbers(geometry: Geometry) -> range:
    """The numbers of the segments."""
    return range(len(geometry.segments))


def describe(geometry: Geometry) -> dict[str, Any]:
    """The geometry as JSON."""
    return {
        "slab_bytes": geometry.slab_bytes,
        "slot_bytes_min": geometry.slot_bytes_min,
        "segments": [[s.tenant, s.slabs] for s in geometry.segments],
    }


def examine(plan: ArenaPlan, folder: Path) -> Found:
    """Compare the directory's content with the plan; nothing is changed.

    Raises:
        KVHearthError: ``ARENA_UNUSABLE`` if there is an arena that the plan cannot adopt and may
            not discard, or the catalogue cannot be read.
    """
    try:
        data = peek(folder / CATALOGUE_NAME)
    except OSError as error:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"cannot read {folder / CATALOGUE_NAME} ({error.strerror}); "
            "give a directory that the daemon may read and write",
        ) from error
    if data is None and not journal_path(folder).exists():
        return Found(Step.COLD)
    try:
        old = json.loads(data or b"")
        made, form = old["geometry"], old["format"]
        version = old.get("journal_version", VERSION)
        geometry = _geometry(made) if form == CATALOGUE_FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return _cold(f"the catalogue in {folder} is damaged, or was never written: starting cold")
    if geometry is None or version != VERSION:
        return _refuse(
            plan,
            f"the arena in {folder} has format {form}.{version}, this daemon's is "
            f"{CATALOGUE_FORMAT}.{VERSION}",
            "start the version that made it",
        )
    kept = old.get("kept", "")
    if bool(kept) != plan.keep:
        where = "in systemd's descriptor store" if kept else f"in {folder}"
        return _refuse(
            plan, f"the arena's memory is {where}", "set keep_memory as it was to keep the cache"
        )
    step = _step(geometry, plan.geometry)
    if step is None or (kept and step is Step.RESIZE):
        return _refuse(
            plan,
            f"the arena in {folder} was made with {_message(geometry)}; these settings ask for "
            f"{_message(plan.geometry)}, and only the memory of a single tenant can change, where "
            "keep_memory is off",
            "restore the old settings to keep the cache",
        )
    journal = folder / RESIZED_NAME
    if not (old.get("journal") and journal.exists()):
        journal = journal_path(folder)
    if not _long_enough(journal, journal_bytes(geometry, 1)):
        return _cold(f"{journal} is missing or too short: starting cold")
    lost = _lost_kept(kept, geometry) if kept else _lost_files(folder, geometry)
    if len(lost) == len(geometry.segments):
        return _cold("the memory of all tenants is missing or too short: starting cold")
    tenants = [geometry.segments[index].tenant for index in sorted(lost)]
    notes = [f"the memory of {name} is missing or too short: it starts cold" for name in tenants]
    return Found(step, old, geometry, lost, notes)


def kept_name(arena: str, index: int) -> str:
    """The name of a segment in the store; ``arena`` tells this cold start from any other."""
    return f"{arena}.{index}"


def _lost_files(folder: Path, geometry: Geometry) -> frozenset[int]:
    return frozenset(
        index
        for index in segment_numbers(geometry)
        if not _long_enough(segment_path(folder, index), geometry.segment_bytes(index))
    )


def _lost_kept(arena: str, geometry: Geometry) -> frozenset[int]:
    """The segments that the store does not have, or not as the daemon made them."""
    store = descriptor_store()
    kept = {} if store is None else store.take()
    try:
        return frozenset(
            index
            for index in segment_numbers(geometry)
            if (fd := kept.get(kept_name(arena, index))) is None
            or not is_sealed(fd)
            or os.fstat(fd).st_size != geometry.segment_bytes(index)
        )
    finally:
        for descriptor in kept.values():
            os.close(descriptor)


def _long_enough(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size >= size


def _cold(note: str) -> Found:
    return Found(Step.COLD, notes=[note])


def _refuse(plan: ArenaPlan, wrong: str, fix: str) -> Found:
    if plan.discard:
        return _cold(f"{wrong}: discarding it (--discard-arena), starting cold")
    raise KVHearthError(
        Reason.ARENA_UNUSABLE, f"{wrong}; {fix}, or give --discard-arena to lose its blocks"
    )


def _step(old: Geometry, new: Geometry) -> Step | None:
    """The step from one geometry to another, None if there is none."""
    if old == new:
        return Step.ADOPT
    alike = (old.slab_bytes, old.slot_bytes_min) == (new.slab_bytes, new.slot_bytes_min)
    tenants = [segment.tenant for segment in old.segments]
    alike &= tenants == [segment.tenant for segment in new.segments]
    return Step.RESIZE if alike and len(tenants) == 1 else None


def _geometry(made: dict[str, Any]) -> Geometry:
    """Parse the geometry that ``describe`` has written.

    Raises:
        ValueError, KeyError, TypeError: the format differs.
    """
    slab = int(made["slab_bytes"])
    tenants = [(str(tenant), int(slabs) * slab) for tenant, slabs in made["segments"]]
    return Geometry.of(tenants, slab, int(made["slot_bytes_min"]))


def _message(geometry: Geometry) -> str:
    parts = [
        f"{format_size(geometry.segment_bytes(i))} of memory for {segment.tenant}"
        for i, segment in enumerate(geometry.segments)
    ]
    sizes = (format_size(geometry.slab_bytes), format_size(geometry.slot_bytes_min))
    return f"{', '.join(parts)}, slab_bytes {sizes[0]} and slot_bytes_min {sizes[1]}"


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
    segments = sum(geometry.segment_bytes(i) for i in segment_numbers(geometry))
    if filesystem is None:
        return Room(segments, 0, 0)
    page_bytes = max(2 * MIB, filesystem.page_bytes)
    journal = journal_bytes(geometry, page_bytes)
    return Room(segments, journal, blob_bytes(CATALOGUE_BYTES_MAX, page_bytes))


def check_room(plan: ArenaPlan, kernel: KernelMemory) -> Found:
    """Refuse a plan that the machine has no place or memory for; nothing is changed.

    Raises:
        KVHearthError: ``ARENA_UNUSABLE``, ``MEMORY_UNAVAILABLE``, ``HUGEPAGES_UNAVAILABLE``.
    """
    if plan.folder is None:
        _check_anonymous(plan, kernel)
        check_memory(kernel.address_space(), room_of(plan.geometry, None).bytes)
        return Found(Step.COLD)
    place = plan.folder if os.path.lexists(plan.folder) else plan.folder.parent
    try:
        if not os.path.isdir(place) and os.access(place.parent, os.X_OK):
            raise KVHearthError(
                Reason.ARENA_UNUSABLE, f"arena_dir: {place} is no directory; create it or mount it"
            )
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
    if plan.keep and found.step is Step.COLD:
        _check_anonymous(plan, kernel)
    _check_files(plan, plan.folder, filesystem, found, kernel)
    check_memory(kernel.address_space(), room_of(plan.geometry, filesystem).bytes)
    return found


def _unmakeable(parent: Path) -> str:
    problem = unwritable(parent)
    return f"it is missing and cannot be made ({problem})" if problem else ""


def _check_anonymous(plan: ArenaPlan, kernel: KernelMemory) -> None:
    """Check the plan by giving each segment the best pages that are left, as the daemon does."""
    geometry = plan.geometry
    kinds = {} if plan.hugepages is HugepagePolicy.OFF else HUGE_BYTES
    free = {size: kernel.pool(size).free for size in kinds.values()}
    small = 0
    for index in segment_numbers(geometry):
        size = geometry.segment_bytes(index)
        fits = [page for page in free if size % page == 0 and size // page <= free[page]]
        if fits:
            free[fits[0]] -= size // fits[0]
        else:
            small += size
    if small and plan.hugepages is HugepagePolicy.REQUIRE:
        needed_bytes = room_of(geometry, None).bytes
        raise no_hugepages(kernel, 2 * MIB, needed_bytes, "huge pages are required: ")
    check_memory(kernel.limits(), small)


def _check_files(
    plan: ArenaPlan, folder: Path, filesystem: Filesystem, found: Found, kernel: KernelMemory
) -> None:
    """Compare the files to be made or extended with the space that is left."""
    room = room_of(plan.geometry, filesystem)
    if plan.keep:
        room = replace(room, segments=0)
    small = filesystem.kind is not FilesystemKind.HUGETLBFS
    if small and found.step is Step.ADOPT:
        return  # an earlier run had to do without what is missing, and so can this one
    missing = _missing(plan, folder, room, found)
    if small:
        check_memory([*kernel.limits(), *filesystem.limits(folder)], missing, f" [{room}]")
        return
    page_bytes = filesystem.page_bytes
    needed = -(-missing // page_bytes)
    what = f"the arena in {folder} takes {room.bytes // page_bytes} pages ({room})"
    if needed > kernel.pool(page_bytes).free:
        what += f", {needed} of them new, and nothing but pages can be had there: "
        fix = ", or give an --arena-dir on tmpfs"
        raise no_hugepages(kernel, page_bytes, missing, what, fix)
    if filesystem.total_bytes and missing > filesystem.free_bytes:
        raise KVHearthError(
            Reason.HUGEPAGES_UNAVAILABLE,
            f"{what}, its mount has room for {filesystem.free_bytes // page_bytes} more; mount it "
            "with a larger size=",
        )


def _missing(plan: ArenaPlan, folder: Path, room: Room, found: Found) -> int:
    """Bytes to be allocated for the files before any file that a crash would need is deleted."""
    if found.step is Step.COLD:
        return max(room.bytes - _taken(*arena_files(folder)), 0)
    journal = journal_path(folder)
    if found.step is Step.RESIZE or not journal.exists():
        journal = folder / RESIZED_NAME  # the new one, made while the old one stays
    segments = [segment_path(folder, i) for i in segment_numbers(plan.geometry)]
    missing = max(room.journal - _taken(journal), 0)
    missing += max(room.catalogue - _taken(folder / CATALOGUE_NAME), 0)
    for index, path in enumerate([] if plan.keep else segments):
        missing += max(plan.geometry.segment_bytes(index) - _taken(path), 0)
    return missing


def _taken(*paths: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())
