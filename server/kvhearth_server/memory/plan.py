"""Arena that the settings request, and the step from the existing arena to it."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.durable_file import peek
from kvhearth_server.memory.journal import VERSION, journal_bytes, journal_path
from kvhearth_server.memory.keeper import is_sealed, open_keeper
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

    ``discard``: an arena in the directory that cannot become this one is deleted. ``keep_s``: the
    segments are sealed memfds with a keeper, which holds them for so long without a daemon; with 0
    they are files in the directory.
    """

    geometry: Geometry
    folder: Path | None
    hugepages: HugepagePolicy
    discard: bool = False
    keep_s: float = 0.0


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
    kept = old.get("kept", "")
    if bool(kept) != bool(plan.keep_s):
        where = "with a keeper" if kept else f"in {folder}"
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
    journal = current_journal(folder, old)
    if not _long_enough(journal, journal_bytes(geometry, 1)):
        return _cold(f"{journal} is missing or too short: starting cold")
    lost = _lost_kept(folder, kept, geometry) if kept else _lost_files(folder, geometry)
    if len(lost) == len(geometry.segments):
        return _cold("the memory of all tenants is missing or too short: starting cold")
    tenants = [geometry.segments[index].tenant for index in sorted(lost)]
    notes = [f"the memory of {name} is missing or too short: it starts cold" for name in tenants]
    return Found(step, old, geometry, lost, notes)


def kept_name(arena: str, index: int) -> str:
    """The name of a segment with its keeper; ``arena`` tells this cold start from any other."""
    return f"{arena}.{index}"


def _lost_files(folder: Path, geometry: Geometry) -> frozenset[int]:
    return frozenset(
        index
        for index in _numbers(geometry)
        if not _long_enough(segment_path(folder, index), geometry.segment_bytes(index))
    )


def _lost_kept(folder: Path, arena: str, geometry: Geometry) -> frozenset[int]:
    """The segments that the keeper does not have, or not as the daemon made them."""
    kept: dict[str, int] = {}
    try:
        keeper = open_keeper(folder, 0.0, start=False)
        if keeper is not None:
            kept = keeper.take()
            keeper.close()
        return frozenset(
            index
            for index in _numbers(geometry)
            if (fd := kept.get(kept_name(arena, index))) is None
            or not is_sealed(fd)
            or os.fstat(fd).st_size != geometry.segment_bytes(index)
        )
    except OSError as error:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            f"the keeper of the arena's memory does not answer ({error}); end it to start cold",
        ) from error
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


def _numbers(geometry: Geometry) -> range:
    return range(len(geometry.segments))
