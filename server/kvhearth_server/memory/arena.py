"""The arena: segments, journal, catalogue and generations, created or adopted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import U32
from kvhearth_server.core.slot_table import SlotTable
from kvhearth_server.memory.durable_file import DurableBlob, lock_directory
from kvhearth_server.memory.journal import VERSION, Journal, journal_path
from kvhearth_server.memory.page_kinds import HugepagePolicy, KernelMemory, filesystem_kind
from kvhearth_server.memory.plan import (
    CATALOGUE_BYTES_MAX,
    CATALOGUE_FORMAT,
    CATALOGUE_NAME,
    RESIZED_NAME,
    ArenaPlan,
    Found,
    Step,
    describe,
    segment_path,
)
from kvhearth_server.memory.resize import resize, settle
from kvhearth_server.memory.room import check_room, room_of
from kvhearth_server.memory.segments import Segment, create_segment, open_segment

_F_ADD_SEALS = 1033
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE, _SEAL_SEAL = 0x2, 0x4, 0x10, 0x1


class Generations:
    """The daemon's writable mapping of the memfd; the seal prevents any other writable mapping."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.fd = os.memfd_create("kvhearth-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = -(-max(count, 1) * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE | _SEAL_SEAL
        fcntl.fcntl(self.fd, _F_ADD_SEALS, seals)
        self.array: U32 = np.frombuffer(self._map, np.uint32, count)

    def close(self) -> None:
        """Close the descriptor; the mapping is released with the last array that uses it."""
        os.close(self.fd)


Progress = Callable[[str, int, int], None]
"""Callback with (name, done bytes, total bytes) while memory is populated."""


@dataclass
class Arena:
    """An open arena. ``catalogue`` is the earlier run's, None after a cold start."""

    plan: ArenaPlan
    segments: list[Segment]
    generations: Generations
    catalogue: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    _blob: DurableBlob | None = None
    _journal_file: Segment | None = None
    _lock_fd: int = -1
    _surplus: list[tuple[Segment, set[int]]] = field(default_factory=list)

    @property
    def durable(self) -> bool:
        """Whether a successor could adopt this arena."""
        return self._blob is not None

    def journal(self, table: SlotTable) -> Journal | None:
        """The journal over a core's table, None for an anonymous arena."""
        if self._journal_file is None:
            return None
        return Journal(self._journal_file, self.plan.geometry, table)

    def catalogue_head(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a catalogue with the arena's own facts of this moment."""
        full = {
            "format": CATALOGUE_FORMAT,
            "journal_version": VERSION,
            "geometry": describe(self.plan.geometry),
            **content,
        }
        if self._surplus:
            (segment, _), *_ = self._surplus
            full["mapped_bytes"] = segment.bytes + segment.surplus_bytes
        return full

    def write_catalogue(self, head: dict[str, Any], namespaces: Sequence[str]) -> None:
        """Make namespaces and groups durable. Any thread may call it, one at a time.

        Args:
            head: from ``catalogue_head``.
            namespaces: JSON objects.

        Raises:
            KVHearthError: ``arena_unusable`` if it does not fit any more.
        """
        if self._blob is None:
            return
        hit("catalogue.before")
        text = json.dumps(head, separators=(",", ":")).removesuffix("}")
        self._blob.write("".join((text, ',"namespaces":[', ",".join(namespaces), "]}")).encode())
        hit("catalogue.after")

    def trim(self, ours: Collection[int] = ()) -> bool:
        """Free the memory of an earlier, larger arena that no client maps any more.

        Returns True if none is left. ``ours``: client bytes of this run's sessions. Such a byte was
        free when it was given out, so its holder of an earlier run has let go.
        """
        for segment, held in list(self._surplus):
            held.intersection_update(set(segment.held_bytes()) - set(ours))
            if not held:
                segment.trim()
                self._surplus.remove((segment, held))
        return not self._surplus

    def close(self) -> None:
        """Unmap everything; files stay for a successor."""
        for segment in self.segments:
            segment.close()
        if self._journal_file is not None:
            self._journal_file.close()
        self.generations.close()
        if self._blob is not None:
            self._blob.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)


def open_arena(plan: ArenaPlan, progress: Progress) -> Arena:
    """Make an arena, or adopt the one that an earlier run left in ``plan.folder``.

    Raises:
        KVHearthError: ``arena_busy``, ``arena_unusable``, ``memory_unavailable``,
            ``hugepages_unavailable``.
    """
    lock_fd = -1
    with contextlib.ExitStack() as undo:
        if plan.folder is not None and os.path.isdir(plan.folder):
            lock_fd = lock_directory(plan.folder)
            undo.callback(os.close, lock_fd)
            _remove_unfinished(plan.folder)
        found = check_room(plan, KernelMemory())
        if plan.folder is not None and lock_fd < 0:
            lock_fd = _make_folder(plan.folder)
            undo.callback(os.close, lock_fd)
        generations = _generations(plan)
        undo.callback(generations.close)
        if plan.folder is None:
            segments = _create_segments(plan, progress)
            arena = Arena(plan, segments, generations, notes=_notes(segments))
        else:
            arena = _open_folder(plan, plan.folder, lock_fd, found, generations, progress)
        undo.pop_all()
        return arena


def _make_folder(folder: Path) -> int:
    """Make the arena's directory and lock it."""
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        message = f"cannot make arena_dir {folder} ({error.strerror}); create it or mount it"
        raise KVHearthError(Reason.ARENA_UNUSABLE, message) from error
    return lock_directory(folder)


def _generations(plan: ArenaPlan) -> Generations:
    try:
        return Generations(plan.geometry.slot_count)
    except (OSError, OverflowError) as error:
        raise KVHearthError(
            Reason.MEMORY_UNAVAILABLE,
            f"no address space for {plan.geometry.slot_count} slots ({error}); ask for less memory "
            "or raise slot_bytes_min",
        ) from None


def _open_folder(
    plan: ArenaPlan,
    folder: Path,
    lock_fd: int,
    found: Found,
    generations: Generations,
    progress: Progress,
) -> Arena:
    with contextlib.ExitStack() as undo:
        blob = DurableBlob(folder / CATALOGUE_NAME, CATALOGUE_BYTES_MAX)
        undo.callback(blob.close)
        notes = list(found.notes)
        old = None
        if found.catalogue is None or found.geometry is None:
            segments, journal = _cold(plan, folder, blob, progress)
        else:
            old = settle(folder, blob, found.catalogue)
            if found.step is Step.RESIZE:
                grown = partial(progress, plan.geometry.segments[0].tenant)
                old, message = resize(plan, folder, blob, old, found.geometry, grown)
                notes.append(message)
            segments = _open_segments(plan, folder, progress)
            journal = open_segment(journal_path(folder))
        notes += _notes(segments)
        surplus = [(each, set(each.held_bytes())) for each in segments if each.surplus_bytes]
        arena = Arena(plan, segments, generations, old, notes, blob, journal, lock_fd, surplus)
        arena.trim()
        undo.pop_all()
        return arena


def _remove_unfinished(folder: Path) -> None:
    """Remove files that a killed daemon left unfinished."""
    for path in folder.glob("*.new"):
        path.unlink(missing_ok=True)


def _numbers(plan: ArenaPlan) -> range:
    return range(len(plan.geometry.segments))


def _cold(
    plan: ArenaPlan, folder: Path, blob: DurableBlob, progress: Progress
) -> tuple[list[Segment], Segment]:
    """Make new files under the same names.

    Old ones are unlinked first: an engine that still maps one continues to write to memory that is
    never read.
    """
    blob.write(json.dumps({"format": CATALOGUE_FORMAT, "geometry": None}).encode())
    for path in [*folder.glob("segment-*"), journal_path(folder), folder / RESIZED_NAME]:
        path.unlink(missing_ok=True)
    segments = _create_segments(plan, progress, folder)
    size = room_of(plan.geometry, filesystem_kind(folder)).journal
    journal = create_segment(
        size,
        HugepagePolicy.PREFER,
        path=journal_path(folder),
        on_progress=partial(progress, "journal"),
    )
    return segments, journal


def _open_segments(plan: ArenaPlan, folder: Path, progress: Progress) -> list[Segment]:
    return [
        open_segment(
            segment_path(folder, index),
            plan.hugepages,
            size_bytes=plan.geometry.segment_bytes(index),
            on_progress=partial(progress, plan.geometry.segments[index].tenant),
        )
        for index in _numbers(plan)
    ]


def _create_segments(
    plan: ArenaPlan, progress: Progress, folder: Path | None = None
) -> list[Segment]:
    with contextlib.ExitStack() as undo:
        segments: list[Segment] = []
        for index in _numbers(plan):
            name = plan.geometry.segments[index].tenant
            segment = create_segment(
                plan.geometry.segment_bytes(index),
                plan.hugepages,
                path=segment_path(folder, index) if folder else None,
                on_progress=partial(progress, name),
            )
            undo.callback(segment.close)
            segments.append(segment)
        undo.pop_all()
        return segments


def _notes(segments: list[Segment]) -> list[str]:
    return [note for segment in segments for note in segment.steps_down]
