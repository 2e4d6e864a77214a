"""The arena: segments, journal, catalogue and generations, cold or adopted."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.faults import hit
from kvhearth_server.core.table import Geometry, SlotTable
from kvhearth_server.memory.dirlock import lock_directory
from kvhearth_server.memory.durable import DurableBlob
from kvhearth_server.memory.generations import Generations
from kvhearth_server.memory.journal import Journal, journal_bytes, journal_path
from kvhearth_server.memory.pages import HugepagePolicy
from kvhearth_server.memory.segments import Segment, create_segment, open_segment

CATALOGUE_FORMAT = 2
CATALOGUE_NAME = "catalogue"
CATALOGUE_BYTES_MAX = 12 << 20
"""Room for all contracts (twice, since they are quoted) and for the groups of all sessions."""
_PAGE_ROUND = 2 << 20

Progress = Callable[[str, int, int], None]
"""Told (what, done bytes, total bytes) while memory is populated."""


@dataclass(frozen=True)
class ArenaPlan:
    """What is wanted: tenants with whole slabs of bytes, and where."""

    geometry: Geometry
    folder: Path | None
    hugepages: HugepagePolicy


@dataclass
class Arena:
    """What is there. ``catalogue`` is the earlier run's, None after a cold start."""

    plan: ArenaPlan
    segments: list[Segment]
    generations: Generations
    catalogue: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    _blob: DurableBlob | None = None
    _journal_file: Segment | None = None
    _lock_fd: int = -1

    @property
    def durable(self) -> bool:
        """A successor could adopt this arena."""
        return self._blob is not None

    def journal(self, table: SlotTable) -> Journal | None:
        """The journal over a core's table, None for an anonymous arena."""
        if self._journal_file is None:
            return None
        return Journal(self._journal_file, self.plan.geometry, table)

    def write_catalogue(self, content: dict[str, Any]) -> None:
        """Make namespaces and groups durable.

        Raises:
            KVHearthError: ``arena_unusable`` if it does not fit any more.
        """
        if self._blob is None:
            return
        hit("catalogue.before")
        full = {"format": CATALOGUE_FORMAT, "geometry": describe(self.plan.geometry), **content}
        self._blob.write(json.dumps(full, separators=(",", ":")).encode())
        hit("catalogue.after")

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


def describe(geometry: Geometry) -> dict[str, Any]:
    """The geometry as JSON: what must be equal for an arena to be adopted."""
    return {
        "slab_bytes": geometry.slab_bytes,
        "slot_bytes_min": geometry.slot_bytes_min,
        "segments": [[s.tenant, s.slabs] for s in geometry.segments],
    }


def open_arena(plan: ArenaPlan, progress: Progress) -> Arena:
    """Make an arena, or map the one that an earlier run left in ``plan.folder``.

    Raises:
        KVHearthError: ``arena_busy``, ``arena_unusable``, ``memory_unavailable``,
            ``hugepages_unavailable``.
    """
    with contextlib.ExitStack() as undo:
        generations = _generations(plan)
        undo.callback(generations.close)
        if plan.folder is None:
            segments = _create_segments(plan, progress)
            arena = Arena(plan, segments, generations, notes=_notes(segments))
        else:
            arena = _open_folder(plan, plan.folder, generations, progress)
        undo.pop_all()
        return arena


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
    plan: ArenaPlan, folder: Path, generations: Generations, progress: Progress
) -> Arena:
    if not folder.is_dir():
        raise KVHearthError(
            Reason.ARENA_UNUSABLE, f"arena_dir {folder} is no directory; create it or mount it"
        )
    with contextlib.ExitStack() as undo:
        lock_fd = lock_directory(folder)
        undo.callback(os.close, lock_fd)
        blob = DurableBlob(folder / CATALOGUE_NAME, CATALOGUE_BYTES_MAX)
        old, notes = _catalogue(blob, plan, folder)
        if old is None:
            arena = _cold(plan, folder, generations, blob, progress)
        else:
            segments = _open_segments(plan, folder, progress)
            journal = open_segment(journal_path(folder))
            arena = Arena(plan, segments, generations, old, [], blob, journal)
        arena.notes = notes + _notes(arena.segments)
        arena._lock_fd = lock_fd
        undo.pop_all()
        return arena


def _numbers(plan: ArenaPlan) -> range:
    return range(len(plan.geometry.segments))


def _segment_path(folder: Path, index: int) -> Path:
    return folder / f"segment-{index}"


def _catalogue(
    blob: DurableBlob, plan: ArenaPlan, folder: Path
) -> tuple[dict[str, Any] | None, list[str]]:
    """The earlier run's catalogue if its arena can be adopted, else why not."""
    data = blob.read()
    if data is None:
        made = journal_path(folder).exists()
        return None, [f"the catalogue in {folder} is damaged: starting cold"] if made else []
    try:
        old = json.loads(data)
        shape, form = old["geometry"], old["format"]
    except (ValueError, KeyError, TypeError):
        return None, [f"the catalogue in {folder} is damaged: starting cold"]
    if form != CATALOGUE_FORMAT:
        return None, [
            f"the arena in {folder} has format {form}, not {CATALOGUE_FORMAT}: starting cold"
        ]
    if not old.get("complete"):
        return None, [f"the arena in {folder} was never finished: starting cold"]
    if shape != describe(plan.geometry):
        return None, [
            f"the arena in {folder} was made with {shape}, wanted is {describe(plan.geometry)}: "
            "starting cold; restore the old settings to keep the cache"
        ]
    wanted = {_segment_path(folder, i): plan.geometry.segment_bytes(i) for i in _numbers(plan)}
    wanted[journal_path(folder)] = journal_bytes(plan.geometry, _PAGE_ROUND)
    for path, size in wanted.items():
        if not path.exists() or path.stat().st_size < size:
            return None, [f"{path} is missing or too short: starting cold"]
    return old, []


def _cold(
    plan: ArenaPlan, folder: Path, generations: Generations, blob: DurableBlob, progress: Progress
) -> Arena:
    """New files under the same names. Old ones are unlinked first: an engine that still maps one
    goes on writing to memory that nobody reads.
    """
    blob.write(json.dumps({"format": CATALOGUE_FORMAT, "geometry": None}).encode())
    for path in [*folder.glob("segment-*"), journal_path(folder)]:
        path.unlink(missing_ok=True)
    segments = _create_segments(plan, progress, folder)
    size = journal_bytes(plan.geometry, _PAGE_ROUND)
    journal = create_segment(
        size,
        HugepagePolicy.PREFER,
        path=journal_path(folder),
        on_progress=partial(progress, "journal"),
    )
    return Arena(plan, segments, generations, None, [], blob, journal)


def _open_segments(plan: ArenaPlan, folder: Path, progress: Progress) -> list[Segment]:
    return [
        open_segment(
            _segment_path(folder, index),
            plan.hugepages,
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
                path=_segment_path(folder, index) if folder else None,
                on_progress=partial(progress, name),
            )
            undo.callback(segment.close)
            segments.append(segment)
        undo.pop_all()
        return segments


def _notes(segments: list[Segment]) -> list[str]:
    return [note for segment in segments for note in segment.steps_down]
