"""Arena that the settings request, and the step from the existing arena to it."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.durable_file import peek
from kvhearth_server.memory.journal import VERSION, journal_bytes, journal_path
from kvhearth_server.memory.page_kinds import HugepagePolicy

CATALOGUE_FORMAT = 2
CATALOGUE_NAME = "catalogue"
CATALOGUE_BYTES_MAX = 12 << 20
"""Room for all contracts (twice, since they are quoted) and for the groups of all sessions."""
RESIZED_NAME = "journal.resized"
"""The journal of an arena that is being resized. It is valid once the catalogue names it."""
JOURNALS = ("journal", RESIZED_NAME)


@dataclass(frozen=True)
class ArenaPlan:
    """The requested arena: tenants with whole slabs of bytes, and its directory.

    ``discard``: an arena in the directory that cannot become this one is deleted.
    """

    geometry: Geometry
    folder: Path | None
    hugepages: HugepagePolicy
    discard: bool = False


class Step(enum.Enum):
    """Step from the directory's content to the requested arena."""

    COLD = "make new files"
    ADOPT = "map the files"
    RESIZE = "move the blocks"


@dataclass(frozen=True)
class Found:
    """The content of an arena directory, compared with a plan.

    ``catalogue`` and ``geometry`` are the earlier run's, None for a cold start. ``notes`` explain
    why an existing arena is not adopted.
    """

    step: Step
    catalogue: dict[str, Any] | None = None
    geometry: Geometry | None = None
    notes: list[str] = field(default_factory=list)


def segment_path(folder: Path, index: int) -> Path:
    """The file of a segment in an arena directory."""
    return folder / f"segment-{index}"


def current_journal(folder: Path, catalogue: dict[str, Any]) -> Path:
    """The journal that a catalogue refers to; after a crash during a resize it has another name."""
    resized = folder / RESIZED_NAME
    return resized if catalogue.get("journal") and resized.exists() else journal_path(folder)


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
        geometry = _geometry(made) if form == CATALOGUE_FORMAT and made is not None else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return _cold(f"the catalogue in {folder} is damaged: starting cold")
    if (form, version) != (CATALOGUE_FORMAT, VERSION):
        return _refuse(
            plan,
            f"the arena in {folder} has format {form}.{version}, this daemon's is "
            f"{CATALOGUE_FORMAT}.{VERSION}",
            "start the version that made it",
        )
    if geometry is None or not old.get("complete"):
        return _cold(f"the arena in {folder} was never finished: starting cold")
    step = _step(geometry, plan.geometry)
    if step is None:
        return _refuse(
            plan,
            f"the arena in {folder} was made with {_message(geometry)}; these settings ask for "
            f"{_message(plan.geometry)}, and only the memory of a single tenant can change",
            "restore the old settings to keep the cache",
        )
    wanted = {segment_path(folder, i): geometry.segment_bytes(i) for i in _numbers(geometry)}
    wanted[current_journal(folder, old)] = journal_bytes(geometry, 1)
    for path, size in wanted.items():
        if not path.exists() or path.stat().st_size < size:
            return _cold(f"{path} is missing or too short: starting cold")
    return Found(step, old, geometry)


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


def _numbers(geometry: Geometry) -> range:
    return range(len(geometry.segments))
