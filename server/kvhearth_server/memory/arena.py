"""The arena: segments, journal, catalogue and generations, created, adopted or resized."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import I64, U32, Records
from kvhearth.shared_memory import map_over
from kvhearth_server.core.slot_table import Geometry, SlotTable, State
from kvhearth_server.memory.descriptor_store import DescriptorStore, descriptor_store
from kvhearth_server.memory.durable_file import (
    DurableBlob,
    catalogue_text,
    link_anew,
    lock_directory,
)
from kvhearth_server.memory.journal import (
    BOUND_WORDS,
    STATE_WORDS,
    VERSION,
    Journal,
    journal_path,
    slab_sizes,
    tables,
)
from kvhearth_server.memory.mapping import (
    HugepagePolicy,
    KernelMemory,
    Segment,
    address_of,
    filesystem_kind,
    make_memfd,
    seal,
)
from kvhearth_server.memory.numa import KernelTopology, Placement, Topology
from kvhearth_server.memory.plan import (
    CATALOGUE_FORMAT,
    CATALOGUE_NAME,
    RESIZED_NAME,
    ArenaPlan,
    Found,
    Room,
    Step,
    arena_files,
    check_room,
    describe,
    kept_name,
    room_of,
    segment_numbers,
    segment_path,
)
from kvhearth_server.memory.populator import Populator
from kvhearth_server.memory.segments import create_segment, open_segment

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


def finish_resize(folder: Path, blob: DurableBlob, catalogue: dict[str, Any]) -> dict[str, Any]:
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
    segment = open_segment(path, plan.hugepages, size_bytes=size, populated=False)
    journal = fresh = None
    try:
        journal = open_segment(journal_path(folder))
        # Made before anything is evicted: without room for it the old arena stays unchanged.
        fresh = _new_journal(folder, new)
        words, headers = tables(journal.view, old)
        moves = _moves(words, headers, old, new)
        _free(words, headers, old, moves.evicted)
        hit("resize.evicted")
        for slab, place in zip(moves.kept.tolist(), moves.places.tolist(), strict=True):
            if slab != place:
                segment.populate(place * old.slab_bytes, old.slab_bytes)
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
    return finish_resize(folder, blob, resized), _message(moves, old, new)


def _cut_surplus(path: Path, plan: ArenaPlan, catalogue: dict[str, Any], old: Geometry) -> bool:
    """Cut off the part of the file that a larger arena left; False while a client maps it."""
    if path.stat().st_size <= old.segment_bytes(0):
        return True
    segment = open_segment(path, plan.hugepages, size_bytes=old.segment_bytes(0), populated=False)
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


def _free(words: npt.NDArray[np.uint64], headers: Records, made: Geometry, slabs: I64) -> None:
    """Free slabs in a journal; after a crash, bytes that are copied there are not believed."""
    for slab in slabs.tolist():
        headers["state"][slab * made.stride : (slab + 1) * made.stride] = _FREE
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


class Generations:
    """The daemon's writable mapping of all slots' generations. The clients of a segment get a memfd
    of its own generations only; a seal prevents any other writable mapping.

    Each memfd is as long as all generations and has holes where other segments' are, so that a slot
    has the same place for everybody. Where a segment does not begin on a page (slabs of fewer than
    1,024 slots), all segments share one memfd.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.count = geometry.slot_count
        self._segments = len(geometry.segments)
        size = -(-max(self.count, 1) * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        starts = [4 * each.first_slab * geometry.stride for each in geometry.segments]
        if any(start % mmap.PAGESIZE for start in starts):
            starts = [0]
        self._map = mmap.mmap(-1, size)
        self._fds: list[int] = []
        with contextlib.ExitStack() as undo:
            for start, end in itertools.pairwise([*starts, size]):
                fd = make_memfd("kvhearth-generations", size)
                undo.callback(os.close, fd)
                if end > start:
                    map_over(address_of(self._map) + start, end - start, fd, start)
                seal(fd, read_only=True)
                self._fds.append(fd)
            undo.pop_all()
        self.array: U32 = np.frombuffer(self._map, np.uint32, self.count)

    def reopen(self, segment: int) -> int:
        """Return a descriptor for a client of a segment; the caller closes it."""
        return os.dup(self._fds[segment if len(self._fds) == self._segments else 0])

    def close(self) -> None:
        """Close the descriptors; the mapping is released with the last array that uses it."""
        for fd in self._fds:
            os.close(fd)


@dataclass
class Arena:
    """An open arena.

    ``catalogue`` is the earlier run's, None after a cold start. The descriptor store has the
    segments under names that begin with ``kept``; if that is empty, they are files, or end with the
    daemon. ``populator`` takes their memory.
    """

    plan: ArenaPlan
    segments: list[Segment]
    generations: Generations
    populator: Populator
    catalogue: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    _blob: DurableBlob | None = None
    _journal_file: Segment | None = None
    kept: str = ""
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
        if self.kept:
            full["kept"] = self.kept
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
        self._blob.write(catalogue_text(head, namespaces))
        hit("catalogue.after")

    def put_back(self) -> list[str]:
        """Link files anew that are no longer under their names; return the names of those that
        cannot be: the kernel links none that has no name at all.
        """
        return [
            each.path.name
            for each in self._memory()
            if each.path and not os.path.lexists(each.path) and not link_anew(each.fd, each.path)
        ]

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
        """Unmap everything; files and kept memory stay for a successor."""
        for each in self._memory():
            each.close()
        self.generations.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def _memory(self) -> list[Segment]:
        files = (self._journal_file, self._blob.segment if self._blob else None)
        return [*self.segments, *filter(None, files)]


def open_arena(plan: ArenaPlan, topology: Topology | None = None) -> Arena:
    """Make an arena, or adopt the one that an earlier run left in ``plan.folder``.

    Its memory is divided among the NUMA nodes of ``topology``, by default this machine's. The first
    of it is populated; the rest is left to ``Arena.populator``.

    Raises:
        KVHearthError: ``arena_busy``, ``arena_unusable``, ``memory_unavailable``,
            ``hugepages_unavailable``.
    """
    lock_fd = -1
    topology = topology or KernelTopology()
    with contextlib.ExitStack() as undo:
        if plan.folder is not None and os.path.isdir(plan.folder):
            lock_fd = lock_directory(plan.folder)
            undo.callback(os.close, lock_fd)
            for unfinished in plan.folder.glob("*.new"):  # left by a killed daemon
                unfinished.unlink(missing_ok=True)
        found = check_room(plan, KernelMemory())
        if plan.folder is not None and lock_fd < 0:
            lock_fd = _make_folder(plan.folder)
            undo.callback(os.close, lock_fd)
        generations = _generations(plan)
        undo.callback(generations.close)
        place = Placement(topology, plan.geometry.slab_bytes)
        memory = _Memory(plan, place, _store(plan))
        if plan.folder is None:
            segments = memory.open(segment_numbers(plan.geometry))
            populator = memory.populator(segments, None)
            arena = Arena(plan, segments, generations, populator, notes=_notes(segments))
        else:
            arena = _open_folder(plan.folder, lock_fd, found, generations, memory)
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
        return Generations(plan.geometry)
    except (OSError, OverflowError) as error:
        raise KVHearthError(
            Reason.MEMORY_UNAVAILABLE,
            f"no address space for {plan.geometry.slot_count} slots ({error}); ask for less memory "
            "or raise slot_bytes_min",
        ) from None


def _open_folder(
    folder: Path, lock_fd: int, found: Found, generations: Generations, memory: _Memory
) -> Arena:
    plan = memory.plan
    room = room_of(plan.geometry, filesystem_kind(folder))
    with contextlib.ExitStack() as undo:
        notes = list(found.notes)
        old = None
        if found.catalogue is None or found.geometry is None:
            memory.kept = secrets.token_hex(8) if plan.keep else ""
            segments, journal, catalogue = _cold(folder, memory, room)
            blob = DurableBlob(catalogue)
        else:
            blob = DurableBlob(open_segment(folder / CATALOGUE_NAME, size_bytes=room.catalogue))
            undo.callback(blob.segment.close)
            old = finish_resize(folder, blob, found.catalogue)
            memory.kept = old.get("kept", "")
            if found.step is Step.RESIZE:
                old, message = resize(plan, folder, blob, old, found.geometry)
                notes.append(message)
            journal = open_segment(journal_path(folder), populated=False)
            undo.callback(journal.close)
            _free_slots(journal, plan.geometry, found.lost)
            segments = memory.open(found.lost)
        populator = memory.populator(segments, journal)
        notes += _notes(segments)
        surplus = [(each, set(each.held_bytes())) for each in segments if each.surplus_bytes]
        made = (populator, old, notes, blob, journal, memory.kept, lock_fd, surplus)
        arena = Arena(plan, segments, generations, *made)
        arena.trim()
        undo.pop_all()
        return arena


def _store(plan: ArenaPlan) -> DescriptorStore | None:
    """The store of the segments' memory, if the plan wants it.

    Raises:
        KVHearthError: ``arena_unusable``.
    """
    found = descriptor_store() if plan.keep else None
    if plan.keep and found is None:
        raise KVHearthError(
            Reason.ARENA_UNUSABLE,
            "keep_memory needs systemd 254 or newer and FileDescriptorStoreMax= in the unit; turn "
            "it off, and the memory is files of arena_dir",
        )
    return found


def _free_slots(journal: Segment, geometry: Geometry, lost: Collection[int]) -> None:
    """Free all slots of segments whose memory is missing, before new memory takes its place."""
    words, headers = tables(journal.view, geometry)
    for index in lost:
        first = geometry.segments[index].first_slab
        own = words[first : first + geometry.segments[index].slabs]
        # Rows of slabs that were never assigned may have no pages.
        _free(words, headers, geometry, first + np.flatnonzero(own))
    hit("arena.slots_freed")


def _cold(folder: Path, memory: _Memory, room: Room) -> tuple[list[Segment], Segment, Segment]:
    """Make new segments, a new journal and an empty catalogue.

    Old files are unlinked first: an engine that still maps one continues to write to memory that is
    never read. Without the catalogue, which goes before all others, nobody adopts them.
    """
    for path in arena_files(folder):
        path.unlink(missing_ok=True)
    memory.forget()
    segments, policy = memory.open(segment_numbers(memory.plan.geometry)), HugepagePolicy.PREFER
    return (
        segments,
        create_segment(room.journal, policy, path=journal_path(folder), populated=False),
        create_segment(room.catalogue, policy, path=folder / CATALOGUE_NAME),
    )


def _close_all(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


@dataclass
class _Memory:
    """The places of a plan's segments: files in its folder, or memfds in the descriptor store.

    Without a folder they are memfds that end with the daemon.
    """

    plan: ArenaPlan
    placement: Placement
    store: DescriptorStore | None = None
    kept: str = ""

    def populator(self, segments: list[Segment], journal: Segment | None) -> Populator:
        """Return what populates the arena, begun.

        Raises:
            KVHearthError: ``memory_unavailable``.
        """
        nodes = np.concatenate([segment.nodes for segment in segments])
        topology = self.placement.topology
        made = Populator(self.plan.geometry, segments, journal, nodes, topology)
        try:
            made.begin()
        except OSError as error:
            message = f"no memory for the journal ({error.strerror}); ask for less"
            raise KVHearthError(Reason.MEMORY_UNAVAILABLE, message) from error
        return made

    def forget(self) -> None:
        """Release all kept memory."""
        if self.store is not None:
            for name, descriptor in self.store.take().items():
                os.close(descriptor)
                self.store.forget(name)

    def open(self, fresh: Collection[int]) -> list[Segment]:
        """Open all segments; those of the numbers ``fresh`` are made anew."""
        taken = self.store.take() if self.store is not None else {}
        segments: list[Segment] = []
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as unused:
            unused.callback(_close_all, taken)
            for index in segment_numbers(self.plan.geometry):
                name = kept_name(self.kept, index)
                if index in fresh:
                    segment = self._make(index)
                else:
                    segment = self._adopt(index, taken.pop(name, -1))
                undo.callback(segment.close)
                segments.append(segment)
            undo.pop_all()
            return segments

    def _make(self, index: int) -> Segment:
        path = None
        if self.plan.folder is not None and self.store is None:
            path = segment_path(self.plan.folder, index)
            path.unlink(missing_ok=True)
        elif self.store is not None:
            self.store.forget(kept_name(self.kept, index))
        segment = create_segment(
            self.plan.geometry.segment_bytes(index),
            self.plan.hugepages,
            path=path,
            populated=False,
            placement=self.placement,
        )
        if self.store is not None:
            self.store.put(kept_name(self.kept, index), segment.fd)
        return segment

    def _adopt(self, index: int, descriptor: int) -> Segment:
        assert self.plan.folder is not None, "memory without a place is never adopted"
        return open_segment(
            segment_path(self.plan.folder, index) if self.store is None else descriptor,
            self.plan.hugepages,
            size_bytes=self.plan.geometry.segment_bytes(index),
            populated=False,
            placement=self.placement,
        )


def _notes(segments: list[Segment]) -> list[str]:
    return [note for segment in segments for note in segment.steps_down]
