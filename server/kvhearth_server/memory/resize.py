"""Crash-safe resizing of an arena, which keeps its blocks.

Whole slabs are kept or evicted. Slabs beyond the new end are copied into slabs that are empty or
evicted for them, and a second journal is written for the new geometry. The old journal changes only
where slabs are evicted. The catalogue, which is written in one step, then names the new geometry
and journal. A crash before that leaves the old arena, a crash after it the new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import I64, Records
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.memory.durable_file import DurableBlob
from kvhearth_server.memory.journal import (
    BOUND_WORDS,
    STATE_WORDS,
    journal_path,
    slab_sizes,
    tables,
)
from kvhearth_server.memory.mapping import Progress
from kvhearth_server.memory.page_kinds import HugepagePolicy, filesystem_kind
from kvhearth_server.memory.plan import RESIZED_NAME, ArenaPlan, describe, room_of, segment_path
from kvhearth_server.memory.segments import Segment, create_segment, open_segment

_FREE = STATE_WORDS[State.FREE]
_FULLNESS = 8
"""Number of steps of fullness; slabs in the same step count as equally full."""


@dataclass(frozen=True)
class _Moves:
    """Placement of slabs: ``kept`` slabs and their ``places`` in the new geometry.

    ``evicted`` slabs are emptied first because another slab takes their place.
    """

    kept: I64
    places: I64
    evicted: I64
    shards: int
    shards_kept: int


def settle(folder: Path, blob: DurableBlob, catalogue: dict[str, Any]) -> dict[str, Any]:
    """Finish a resize that a crash interrupted, or remove its remains; returns the catalogue."""
    resized = folder / RESIZED_NAME
    if not catalogue.get("journal"):
        resized.unlink(missing_ok=True)
        return catalogue
    if resized.exists():
        resized.rename(journal_path(folder))
    hit("resize.renamed")
    settled = {name: value for name, value in catalogue.items() if name != "journal"}
    blob.write(_encoded(settled))
    return settled


def resize(
    plan: ArenaPlan,
    folder: Path,
    blob: DurableBlob,
    catalogue: dict[str, Any],
    old: Geometry,
    progress: Progress,
) -> tuple[dict[str, Any], str]:
    """Turn the arena of geometry ``old`` into the plan's.

    Returns its catalogue, and a sentence for the log.

    Raises:
        KVHearthError: ``ARENA_BUSY`` if a client of an earlier run may still write to the part that
            is to be added; otherwise as ``open_segment`` and ``create_segment``. The old arena then
            still exists.
    """
    new = plan.geometry
    path = segment_path(folder, 0)
    if _cut_surplus(path, plan, catalogue, old) and "mapped_bytes" in catalogue:
        # Before the file is extended again: a surplus left by a crash during that is not mapped by
        # any client.
        catalogue = {name: value for name, value in catalogue.items() if name != "mapped_bytes"}
        blob.write(_encoded(catalogue))
    size = max(old.segment_bytes(0), new.segment_bytes(0))
    segment = open_segment(path, plan.hugepages, size_bytes=size, on_progress=progress)
    journal = fresh = None
    try:
        journal = open_segment(journal_path(folder))
        # Made before anything is evicted: without room for it the old arena stays unchanged.
        fresh = _new_journal(folder, new)
        words, headers = tables(journal.view, old)
        moves = _moves(words, headers, old, new)
        _evict(words, headers, old, moves.evicted)
        hit("resize.evicted")
        for slab, place in zip(moves.kept.tolist(), moves.places.tolist(), strict=True):
            if slab != place:
                _slab(segment, old, place)[:] = _slab(segment, old, slab)
        hit("resize.copied")
        _fill_journal(fresh, words, headers, moves, old, new)
        hit("resize.journal_written")
    finally:
        for each in filter(None, (segment, journal, fresh)):
            each.close()
    resized = {**catalogue, "geometry": describe(new), "journal": RESIZED_NAME}
    if new.slab_count < old.slab_count:
        resized["mapped_bytes"] = max(size, catalogue.get("mapped_bytes", 0))
    for _ in range(2):  # both halves, so that damage to one does not bring back the old geometry
        blob.write(_encoded(resized))
        hit("resize.committed")
    return settle(folder, blob, resized), _message(moves, old, new)


def _cut_surplus(path: Path, plan: ArenaPlan, catalogue: dict[str, Any], old: Geometry) -> bool:
    """Cut off the part of the file that a larger arena left; False while a client maps it."""
    if path.stat().st_size <= old.segment_bytes(0):
        return True
    segment = open_segment(path, plan.hugepages, size_bytes=old.segment_bytes(0))
    try:
        if not segment.held_bytes():
            segment.trim()
            return True
        if plan.geometry.slab_count > old.slab_count and catalogue.get("mapped_bytes"):
            raise KVHearthError(
                Reason.ARENA_BUSY,
                f"clients of an earlier run still map {path} beyond its present end, where they "
                "may write; end them before giving it more memory",
            )
        return False
    finally:
        segment.close()


def _moves(words: npt.NDArray[np.uint64], headers: Records, old: Geometry, new: Geometry) -> _Moves:
    """Choose the slabs to keep and their places.

    The fullest slabs are kept; among equally full ones, those that hold the ancestors of the latest
    blocks.
    """
    sizes = np.array(slab_sizes(words), np.int64)
    assigned = np.flatnonzero(sizes)
    states = headers["state"].reshape(old.slab_count, old.stride)
    bound = np.zeros(old.slab_count, np.int64)
    busy = np.zeros(old.slab_count, np.bool_)
    for slab in assigned.tolist():
        row = states[slab]
        is_bound = np.isin(row, BOUND_WORDS)
        bound[slab] = is_bound.sum()
        busy[slab] = sizes[slab] < 0 or bool((~is_bound & (row != _FREE)).any())
    head = np.arange(old.slab_count) < new.slab_count
    fixed = assigned[busy[assigned] & head[assigned]]
    others = assigned[~np.isin(assigned, fixed) & (bound[assigned] > 0)]
    room = new.slab_count - len(fixed)
    if len(others) > room:
        fullness = bound * sizes * _FULLNESS // old.slab_bytes
        latest = _latest(headers, others, old)
        order = np.lexsort((others, -latest[others], -fullness[others]))
        others = np.sort(others[order[:room]])
    kept = np.concatenate([fixed, others])
    unmoved, moved = kept[head[kept]], kept[~head[kept]]
    # An empty slab is used before one that has to be evicted.
    places = np.setdiff1d(np.arange(min(old.slab_count, new.slab_count)), unmoved)
    places = places[np.argsort(bound[places] > 0, kind="stable")][: len(moved)]
    return _Moves(
        np.concatenate([unmoved, moved]),
        np.concatenate([unmoved, places]),
        places[sizes[places] != 0],
        int(bound.sum()),
        int(bound[kept].sum()),
    )


def _latest(headers: Records, slabs: I64, geometry: Geometry) -> npt.NDArray[np.float64]:
    """Mean age of the blocks of each slab, shape (slabs,).

    A block is as young as the youngest block of its chain that is stored on top of it.
    """
    rows = (slabs[:, None] * geometry.stride + np.arange(geometry.stride)).reshape(-1)
    rows = rows[np.isin(headers["state"][rows], BOUND_WORDS)]
    rows = rows[np.argsort(headers["sequence"][rows], kind="stable")]
    sequences, parents = headers["sequence"][rows], headers["parent_sequence"][rows]
    place = np.minimum(np.searchsorted(sequences, parents), max(len(rows) - 1, 0))
    above = np.where(sequences[place] == parents, place, -1).tolist()
    youngest = sequences.tolist()
    for index in range(len(youngest) - 1, -1, -1):
        parent = above[index]
        if 0 <= parent < index and youngest[parent] < youngest[index]:
            youngest[parent] = youngest[index]
    where = rows // geometry.stride
    total = np.bincount(where, np.array(youngest, np.float64), geometry.slab_count)
    return np.asarray(total / np.maximum(np.bincount(where, minlength=geometry.slab_count), 1))


def _evict(words: npt.NDArray[np.uint64], headers: Records, old: Geometry, slabs: I64) -> None:
    """Empty slabs in the old journal; after a crash, bytes copied there are not believed."""
    for slab in slabs.tolist():
        headers["state"][slab * old.stride : (slab + 1) * old.stride] = _FREE
        words[slab] = 0


def _slab(segment: Segment, geometry: Geometry, slab: int) -> npt.NDArray[np.uint8]:
    return segment.view[slab * geometry.slab_bytes : (slab + 1) * geometry.slab_bytes]


def _new_journal(folder: Path, new: Geometry) -> Segment:
    path = folder / RESIZED_NAME
    path.unlink(missing_ok=True)
    size = room_of(new, filesystem_kind(folder)).journal
    return create_segment(size, HugepagePolicy.PREFER, path=path)


def _fill_journal(
    fresh: Segment,
    words: npt.NDArray[np.uint64],
    headers: Records,
    moves: _Moves,
    old: Geometry,
    new: Geometry,
) -> None:
    new_words, new_headers = tables(fresh.view, new)
    new_words[moves.places] = words[moves.kept]
    rows = new_headers.reshape(new.slab_count, new.stride)
    before = headers.reshape(old.slab_count, old.stride)
    for slab, place in zip(moves.kept.tolist(), moves.places.tolist(), strict=True):
        rows[place] = before[slab]


def _message(moves: _Moves, old: Geometry, new: Geometry) -> str:
    message = f"the arena has {new.slab_count} slabs now, it had {old.slab_count}"
    if moves.shards_kept == moves.shards:
        return f"{message}; every block was kept"
    gone = moves.shards - moves.shards_kept
    return f"{message}; {gone} of {moves.shards} shards of blocks were evicted to fit"


def _encoded(catalogue: dict[str, Any]) -> bytes:
    return json.dumps(catalogue, separators=(",", ":")).encode()
