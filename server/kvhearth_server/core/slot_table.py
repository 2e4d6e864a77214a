"""Slot table: geometry of the arena, all per-slot state in arrays, and the slabs of the slots.

A segment is cut into slabs, a slab into slots of one size. Slot numbers are sparse: slot ``i`` of
slab ``s`` is ``s * stride + i`` whatever the slab's slot size is. Therefore the number of a slot
gives its place without a table, and a slab that changes its slot size renumbers nothing. Rows of
numbers that no slab uses are never touched and cost address space only, which is why every array
uses zero for "nothing".
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhearth.model import (
    CHECKSUM_BYTES,
    EXTENT_DTYPE,
    EXTENT_RECORD,
    FLAG_SUMMED,
    FLAG_VERIFY,
    I64,
    U32,
    Records,
)


class State(enum.IntEnum):
    """State of a slot. ``SUMMED`` is the only state that may be served."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    SUMMED = 3
    QUARANTINED = 4
    LOADING = 5


class CopyState(enum.IntEnum):
    """State of a block's copy on a slower tier; zero for blocks that were never queued."""

    NOT = 0
    QUEUED = 1
    WRITING = 2
    SAVED = 3
    REFUSED = 4


KERNEL = 0xFFFF_FFFE
"""Owner of slots that the kernel may write to for the daemon: blocks being promoted."""

Pick = slice | I64
"""Rows of the table: slot numbers, or a slice where slots lie side by side, which costs half as
much. A slice has both ends and no step.
"""


def ascending(slots: I64) -> Pick:
    """Rows of slots with ascending numbers."""
    count = len(slots)
    if not count:
        return slots
    first, end = slots.item(0), slots.item(-1) + 1
    return slice(first, end) if end - first == count else slots


def all_zero(values: npt.NDArray[np.unsignedinteger[Any]]) -> bool:
    """Whether all values are zero; on bytes this is several times as fast as in numpy."""
    return values.tobytes() == bytes(values.nbytes)


def numbers(rows: Pick) -> I64:
    """The slots of some rows."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


@dataclass(frozen=True)
class SegmentGeometry:
    """A segment: one tenant's memory, ``slabs`` slabs from global slab number ``first_slab``."""

    tenant: str
    slabs: int
    first_slab: int


@dataclass(frozen=True)
class Geometry:
    """Partition of the arena, in bytes; ``slot_bytes_min`` divides ``slab_bytes``."""

    slab_bytes: int
    slot_bytes_min: int
    segments: tuple[SegmentGeometry, ...]

    @classmethod
    def of(cls, tenants: list[tuple[str, int]], slab_bytes: int, slot_bytes_min: int) -> Geometry:
        """Make the geometry for (tenant, bytes) pairs; bytes are whole slabs."""
        segments, first = [], 0
        for tenant, size in tenants:
            if size < slab_bytes or size % slab_bytes or slab_bytes % slot_bytes_min:
                raise ValueError(f"segment of {size} bytes in slabs of {slab_bytes} is not whole")
            segments.append(SegmentGeometry(tenant, size // slab_bytes, first))
            first += size // slab_bytes
        return cls(slab_bytes, slot_bytes_min, tuple(segments))

    @property
    def stride(self) -> int:
        """Slot numbers per slab."""
        return self.slab_bytes // self.slot_bytes_min

    @property
    def slab_count(self) -> int:
        """Number of slabs of all segments."""
        return sum(segment.slabs for segment in self.segments)

    @property
    def slot_count(self) -> int:
        """Number of slot numbers, used or not."""
        return self.slab_count * self.stride

    def slot_bytes_for(self, page_bytes: int) -> int:
        """Size of the slots that hold shards of ``page_bytes``; 0 if none can."""
        units = -(-page_bytes // self.slot_bytes_min)
        size = units * self.slot_bytes_min
        return size if size <= self.slab_bytes else 0

    def segment_bytes(self, index: int) -> int:
        """Bytes of a segment."""
        return self.segments[index].slabs * self.slab_bytes


@dataclass
class SlotTable:
    """Arrays of shape (slot_count,), one row per slot; and per slab its slot size.

    Links hold a slot number plus one, zero for none. A block is named by its head, the slot of
    shard 0; the others are linked through ``sibling`` and point back by ``head``. ``parent``,
    ``child`` (the youngest one), ``older`` and ``younger`` (among the children of one parent) join
    the heads of a chain; see ``chains``. Two columns apply to heads only: ``copy_state``, the state
    of a copy in a lower tier (see ``writeback_queue``), and ``sequence``, the number of the commit.
    """

    geometry: Geometry
    generation: U32
    state: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        count = self.geometry.slot_count
        if self.generation.shape != (count,) or self.generation.dtype != np.uint32:
            raise ValueError(f"generations must be u32 of shape ({count},)")
        self._stride = stride = self.geometry.stride
        # Nearly always a power of two, where shifts take half the time of divisions.
        self._shift = None if stride & stride - 1 else stride.bit_length() - 1
        self.state = np.zeros(count, np.uint8)
        self.flags = np.zeros(count, np.uint8)
        self.group = np.zeros(count, np.uint8)
        self.namespace = np.zeros(count, np.uint16)
        self.refs = np.zeros(count, np.uint32)
        self.pins = np.zeros(count, np.uint16)
        self.epoch = np.zeros(count, np.uint32)
        self.owner = np.zeros(count, np.uint32)
        self.used_at = np.zeros(count, np.uint32)
        self.copy_state = np.zeros(count, np.uint8)
        self.sequence = np.zeros(count, np.uint64)
        self.head = np.zeros(count, np.uint32)
        self.sibling = np.zeros(count, np.uint32)
        self.parent = np.zeros(count, np.uint32)
        self.child = np.zeros(count, np.uint32)
        self.older = np.zeros(count, np.uint32)
        self.younger = np.zeros(count, np.uint32)
        self.checksum = np.zeros(count, f"V{CHECKSUM_BYTES}")
        slabs = self.geometry.slab_count
        self.slab_slot_bytes = np.zeros(slabs, np.int64)
        self.slab_segment = np.zeros(slabs, np.int64)
        self.slab_first = np.zeros(slabs, np.int64)
        self.slab_node = np.zeros(slabs, np.int64)
        """NUMA node of each slab's memory; set before any slab is assigned."""
        self.slab_populated = np.ones(slabs, np.bool_)
        """Whether each slab has all its pages; another thread may set it meanwhile."""
        for index, segment in enumerate(self.geometry.segments):
            span = slice(segment.first_slab, segment.first_slab + segment.slabs)
            self.slab_segment[span] = index
            self.slab_first[span] = segment.first_slab

    def slabs_of(self, slots: I64) -> I64:
        """Slab number of each slot."""
        return slots // self._stride if self._shift is None else slots >> self._shift

    def slot_bytes_of(self, slots: I64) -> I64:
        """Slot size of each slot, in bytes."""
        return self.slab_slot_bytes[self.slabs_of(slots)]

    def total_bytes(self, rows: Pick) -> int:
        """Bytes of arena that the slots take."""
        if isinstance(rows, slice):
            slab = rows.start // self._stride
            count: int = rows.stop - rows.start
            if (rows.stop - 1) // self._stride == slab:
                return count * int(self.slab_slot_bytes.item(slab))
        return int(np.add.reduce(self.slot_bytes_of(numbers(rows))))

    def in_use(self, slots: I64) -> npt.NDArray[np.bool_]:
        """Whether numbers name existing slots: within the table, in an assigned slab, inside it."""
        stride = self.geometry.stride
        good = (slots >= 0) & (slots < self.geometry.slot_count)
        safe = np.where(good, slots, 0)
        size = self.slab_slot_bytes[safe // stride]
        fits: npt.NDArray[np.bool_] = (safe % stride + 1) * size <= self.geometry.slab_bytes
        return np.asarray(good & (size > 0) & fits)

    def bump(self, slots: I64) -> None:
        """Invalidate every extent of these slots that was handed out so far."""
        self.generation[slots] += np.uint32(1)

    def kinds(self, heads: I64) -> I64:
        """A number of namespace and KV group of each block: ``number << 8 | group``."""
        kinds: I64 = self.namespace[heads].astype(np.int64) << 8 | self.group[heads]
        return kinds

    def by_kind(self, heads: I64) -> Iterator[tuple[int, int, I64]]:
        """Yield the number of the namespace, the KV group and the heads of each kind of blocks."""
        kinds = self.kinds(heads)
        alike = np.count_nonzero(kinds == kinds[:1]) == len(kinds)
        for kind in (kinds[:1] if alike else np.unique(kinds)).tolist():
            yield kind >> 8, kind & 0xFF, heads if alike else heads[kinds == kind]

    def by_segment(self, slots: I64) -> Iterator[tuple[int, I64]]:
        """Yield each segment that has some of the slots, and those."""
        segments = self.slab_segment[self.slabs_of(slots)]
        for segment in np.unique(segments).tolist():
            yield segment, slots[segments == segment]

    def blocks_of(self, heads: I64) -> list[I64]:
        """All slots of each block in rank order, one array (blocks, shards) per shard count."""
        found, rows = list[I64](), heads.reshape(-1, 1)
        while len(rows):
            links = self.sibling[rows[:, -1]].astype(np.int64)
            if len(whole := rows[links == 0]):
                found.append(whole)
            more = links > 0
            rows = np.column_stack([rows[more], links[more] - 1])
        return found

    def all_shards(self, heads: I64, shards: int) -> I64:
        """Slots of blocks, shape (n, shards), in rank order."""
        if shards == 1:
            return heads.reshape(-1, 1)
        columns = [heads]
        for _ in range(shards - 1):
            columns.append(self.sibling[columns[-1]].astype(np.int64) - 1)
        return np.stack(columns, axis=1)

    def extents(self, slots: I64, length: int, *, summed: bool = False) -> Records:
        """Make records of ``EXTENT_DTYPE`` for shards of ``length`` bytes, flat.

        ``summed``: all of the slots are SUMMED; otherwise none is. A reserved slot still has its
        last block's checksum in the table, which must not be given out.
        """
        flat = slots.reshape(-1)
        if len(flat) == 1:
            return self._extent(int(flat[0]), length, summed)
        slab = self.slabs_of(flat)
        row = flat - slab * self._stride
        records = np.zeros(len(flat), EXTENT_DTYPE)
        records["slot"] = flat
        records["segment"] = self.slab_segment[slab]
        inside = (slab - self.slab_first[slab]) * self.geometry.slab_bytes
        records["offset"] = inside + row * self.slab_slot_bytes[slab]
        records["length"] = length
        records["generation"] = self.generation[flat]
        if summed:
            records["checksum"] = self.checksum[flat]
            records["flags"] = self.flags[flat] & FLAG_VERIFY | FLAG_SUMMED
        return records

    def extents_beside(self, rows: slice, length: int) -> Records:
        """Make the extents of SUMMED slots that lie side by side; see ``extents``."""
        slab = rows.start // self._stride
        if (rows.stop - 1) // self._stride != slab:
            return self.extents(numbers(rows), length, summed=True)
        first, size = slab * self._stride, self.slab_slot_bytes.item(slab)
        start = (slab - self.slab_first.item(slab)) * self.geometry.slab_bytes
        start += (rows.start - first) * size
        count = rows.stop - rows.start
        # The common fields are packed once and copied with the memory; most daemons never set a
        # flag.
        alike = EXTENT_RECORD.pack(0, self.slab_segment.item(slab), FLAG_SUMMED, 0, length, 0, b"")
        records = np.frombuffer(bytearray(alike * count), EXTENT_DTYPE)
        if not all_zero(flags := self.flags[rows]):
            records["flags"] = flags & FLAG_VERIFY | FLAG_SUMMED
        records["slot"] = np.arange(rows.start, rows.stop, dtype=np.uint32)
        records["offset"] = np.arange(start, start + count * size, size)
        records["generation"] = self.generation[rows]
        records["checksum"] = self.checksum[rows]
        return records

    def _extent(self, slot: int, length: int, summed: bool) -> Records:
        """Make the extent of one slot: a record is packed faster than filled field by field."""
        slab, row = divmod(slot, self._stride)
        offset = (slab - self.slab_first.item(slab)) * self.geometry.slab_bytes
        offset += row * self.slab_slot_bytes.item(slab)
        flags, checksum = 0, b""
        if summed:
            flags = self.flags.item(slot) & FLAG_VERIFY | FLAG_SUMMED
            checksum = self.checksum[slot].tobytes()
        segment, generation = self.slab_segment.item(slab), self.generation.item(slot)
        packed = EXTENT_RECORD.pack(slot, segment, flags, offset, length, generation, checksum)
        return np.frombuffer(bytearray(packed), EXTENT_DTYPE)


class _SizeClass:
    """The free slots of one slot size; a segment has at most ``slots_max`` of them."""

    def __init__(self, slots_max: int) -> None:
        # Full size from the start: copying a stack of millions takes longer than a call may.
        # Entries that were never used take no memory.
        self.free = np.zeros(slots_max, np.int64)
        self.count = 0

    def push(self, slots: I64) -> None:
        need = self.count + len(slots)
        self.free[self.count : need] = slots
        self.count = need

    def pop(self, count: int) -> I64:
        """Take ``count`` slots; the lowest was pushed last, so neighbours come out ascending."""
        start = self.count - count
        taken = self.free[start : self.count][::-1].copy()
        self.count = start
        return taken

    def drop_slab(self, slab: int, stride: int) -> None:
        live = self.free[: self.count]
        kept = live[live // stride != slab]
        self.free[: len(kept)] = kept
        self.count = len(kept)


@dataclass
class _Node:
    """Free slots by size, and slabs without a size, of one NUMA node.

    ``unassigned`` is a dict, because adoption takes slabs out of the middle.
    """

    classes: dict[int, _SizeClass] = field(default_factory=dict)
    unassigned: dict[int, None] = field(default_factory=dict)

    def free_count(self, slot_bytes: int) -> int:
        found = self.classes.get(slot_bytes)
        return found.count if found else 0


class SlabPool:
    """Allocator of one segment; does not decide on eviction."""

    def __init__(self, table: SlotTable, segment: int, sized: Callable[[int, int], None]) -> None:
        """Make a pool; ``sized`` is called with each slab and its new slot size, in order."""
        self._table = table
        self._sized = sized
        geometry = table.geometry
        shape = geometry.segments[segment]
        self.segment = segment
        self.first_slab = shape.first_slab
        self.end_slab = shape.first_slab + shape.slabs
        self._stride = geometry.stride
        self._slab_bytes = geometry.slab_bytes
        self.slab_used = np.zeros(shape.slabs, np.int64)
        self._withheld: set[int] = set()
        nodes = table.slab_node[self.first_slab : self.end_slab].tolist()
        self._nodes = {node: _Node() for node in sorted(set(nodes))}
        self._first = self._nodes[nodes[0]]
        # The last one is assigned next.
        for slab in range(self.end_slab - 1, self.first_slab - 1, -1):
            self._node_of(slab).unassigned[slab] = None

    @property
    def has_nodes(self) -> bool:
        """Whether the segment lies on several NUMA nodes."""
        return len(self._nodes) > 1

    @property
    def unassigned_count(self) -> int:
        """Number of slabs that no slot size holds."""
        return sum(len(node.unassigned) for node in self._nodes.values())

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest slot that could be taken without evicting anything."""
        if self.unassigned_count:
            return self._slab_bytes
        return max((size for size, found in self._every_class() if found.count), default=0)

    def _every_class(self) -> Iterator[tuple[int, _SizeClass]]:
        for node in self._nodes.values():
            yield from node.classes.items()

    def free_count(self, slot_bytes: int) -> int:
        """Number of free slots of a size, without taking another slab."""
        return sum(node.free_count(slot_bytes) for node in self._nodes.values())

    def slots_per_slab(self, slot_bytes: int) -> int:
        """Number of slots in a slab of this size."""
        return self._slab_bytes // slot_bytes

    def can_take(self, slot_bytes: int) -> int:
        """Number of slots that could be taken without evicting anything."""
        return self.free_count(slot_bytes) + self.unassigned_count * self.slots_per_slab(slot_bytes)

    def withhold(self, slabs: Iterable[int]) -> int:
        """Give out no more slots of some slabs; return the bytes that this takes away: all but
        those of used slots, which stay in use.
        """
        lost = 0
        for slab in sorted(set(slabs) - self._withheld):
            self._withheld.add(slab)
            node, size = self._node_of(slab), self._table.slab_slot_bytes.item(slab)
            if size:
                node.classes[size].drop_slab(slab, self._stride)
            else:
                del node.unassigned[slab]
            lost += self._slab_bytes - self.slab_used.item(slab - self.first_slab) * size
        return lost

    def offer(self, slabs: Iterable[int]) -> int:
        """Undo ``withhold`` for slabs that no slot size holds; return the bytes that this brings.

        They are assigned after those that are there already, in ascending order.
        """
        fresh = sorted(self._withheld.intersection(slabs), reverse=True)
        self._withheld.difference_update(fresh)
        for number, node in self._nodes.items():
            own = [slab for slab in fresh if self._table.slab_node.item(slab) == number]
            node.unassigned = dict.fromkeys([*own, *node.unassigned])
        return len(fresh) * self._slab_bytes

    def take(self, slot_bytes: int, count: int, node: int = -1) -> I64:
        """Take up to ``count`` free slots, assigning slabs as needed; their state stays FREE.

        Slots on NUMA node ``node`` come first, then those of the nodes with most room.
        """
        if len(self._nodes) == 1:
            slots = self._take_on(self._first, slot_bytes, count)
        else:
            slots = self._take_near(slot_bytes, count, node)
        np.add.at(self.slab_used, slots // self._stride - self.first_slab, 1)
        return slots

    def _take_near(self, slot_bytes: int, count: int, near: int) -> I64:
        each = self.slots_per_slab(slot_bytes)

        def order(item: tuple[int, _Node]) -> tuple[bool, int]:
            number, node = item
            return number != near, -node.free_count(slot_bytes) - len(node.unassigned) * each

        taken, left = list[I64](), count
        for _, node in sorted(self._nodes.items(), key=order):
            taken.append(self._take_on(node, slot_bytes, left))
            left -= len(taken[-1])
        return np.concatenate(taken)

    def _take_on(self, node: _Node, slot_bytes: int, count: int) -> I64:
        found = self._class_of(node, slot_bytes)
        while found.count < count and node.unassigned:
            self.assign(node.unassigned.popitem()[0], slot_bytes)
        return found.pop(min(count, found.count))

    def _node_of(self, slab: int) -> _Node:
        return self._nodes[self._table.slab_node.item(slab)]

    def _class_of(self, node: _Node, slot_bytes: int) -> _SizeClass:
        found = node.classes.get(slot_bytes)
        if found is None:
            slots_max = (self.end_slab - self.first_slab) * self.slots_per_slab(slot_bytes)
            found = node.classes[slot_bytes] = _SizeClass(slots_max)
        return found

    def give(self, slots: I64) -> int:
        """Return slots of any sizes; the caller has set their state to FREE.

        Returns the bytes of those that are withheld from now on.
        """
        lost = 0
        np.subtract.at(self.slab_used, slots // self._stride - self.first_slab, 1)
        if self._withheld:
            gone = np.isin(self._table.slabs_of(slots), list(self._withheld))
            lost = int(self._table.slot_bytes_of(slots[gone]).sum())
            slots = slots[~gone]
        if len(slots):
            self._give_all(slots)
        return lost

    def _give_all(self, slots: I64) -> None:
        if len(self._nodes) == 1:
            self._give_on(self._first, slots)
            return
        nodes = self._table.slab_node[self._table.slabs_of(slots)]
        for number in np.unique(nodes).tolist():
            self._give_on(self._nodes[number], slots[nodes == number])

    def _give_on(self, node: _Node, slots: I64) -> None:
        sizes = self._table.slot_bytes_of(slots)
        first = int(sizes[0])
        if (sizes == first).all():
            node.classes[first].push(slots[::-1])
            return
        for size in np.unique(sizes):
            node.classes[int(size)].push(slots[sizes == size][::-1])

    def assign(self, slab: int, slot_bytes: int, used: I64 | None = None) -> None:
        """Give a slab to a slot size; all its slots except ``used`` become free."""
        self._table.slab_slot_bytes[slab] = slot_bytes
        self._sized(slab, slot_bytes)
        free = np.ones(self.slots_per_slab(slot_bytes), np.bool_)
        first = slab * self._stride
        if used is not None:
            free[used - first] = False
        slots = np.flatnonzero(free)[::-1].astype(np.int64) + first
        self._class_of(self._node_of(slab), slot_bytes).push(slots)

    def adopt(self, slab: int, slot_bytes: int, used: I64) -> None:
        """Restore a slab after a restart: ``used`` are its slots that are not free."""
        del self._node_of(slab).unassigned[slab]
        self.assign(slab, slot_bytes, used)
        self.slab_used[slab - self.first_slab] = len(used)

    def take_back(self, slab: int) -> None:
        """Take an empty slab from its slot size."""
        if self.slab_used[slab - self.first_slab]:
            raise ValueError(f"slab {slab} is not empty")
        size, node = int(self._table.slab_slot_bytes[slab]), self._node_of(slab)
        node.classes[size].drop_slab(slab, self._stride)
        self._table.slab_slot_bytes[slab] = 0
        self._sized(slab, 0)
        if slab not in self._withheld:
            node.unassigned[slab] = None

    def slabs_of_others(self, slot_bytes: int) -> list[int]:
        """Slabs that other slot sizes hold, the emptiest first."""
        sizes = self._table.slab_slot_bytes[self.first_slab : self.end_slab]
        others = np.flatnonzero((sizes != 0) & (sizes != slot_bytes))
        order = np.argsort(self.slab_used[others], kind="stable")
        return [int(slab) + self.first_slab for slab in others[order]]

    def empty_of_others(self, slot_bytes: int) -> int | None:
        """An empty slab that another slot size holds; None if there is none."""
        sizes = self._table.slab_slot_bytes[self.first_slab : self.end_slab]
        empty = (self.slab_used == 0) & (sizes != 0) & (sizes != slot_bytes)
        place = int(empty.argmax())
        return place + self.first_slab if empty[place] else None

    def slots_in(self, slab: int) -> slice:
        """Row range of a slab's slots."""
        size = int(self._table.slab_slot_bytes[slab])
        start = slab * self._stride
        return slice(start, start + (self.slots_per_slab(size) if size else 0))

    def check(self) -> None:
        """Raise ValueError if free stacks, slab counts and slot states disagree."""
        table = self._table
        for size, found in self._every_class():
            live = found.free[: found.count]
            ordered = np.sort(live)  # np.unique takes several times as long
            if (ordered[1:] == ordered[:-1]).any():
                raise ValueError(f"size {size}: a slot is twice on the free stack")
            if len(live) and (table.state[live] != State.FREE).any():
                raise ValueError(f"size {size}: a slot on the free stack is not FREE")
            if len(live) and (table.slot_bytes_of(live) != size).any():
                raise ValueError(f"size {size}: a free slot is in another size's slab")
        for number, node in self._nodes.items():
            for found in node.classes.values():
                slabs = table.slabs_of(found.free[: found.count])
                if (table.slab_node[slabs] != number).any():
                    raise ValueError(f"node {number}: a free slot lies on another node")
        kept = np.ones(self.end_slab - self.first_slab, np.bool_)
        kept[[slab - self.first_slab for slab in self._withheld]] = False
        free_total = sum(found.count for _, found in self._every_class())
        used_total = 0
        for slab in range(self.first_slab, self.end_slab):
            used = int((table.state[self.slots_in(slab)] != State.FREE).sum())
            if used != self.slab_used[slab - self.first_slab]:
                booked = self.slab_used[slab - self.first_slab]
                raise ValueError(f"slab {slab}: {used} slots in use, booked {booked}")
            used_total += used if kept[slab - self.first_slab] else 0
        sizes = table.slab_slot_bytes[self.first_slab : self.end_slab][kept]
        slots = int((self._slab_bytes // sizes[sizes > 0]).sum())
        if slots != free_total + used_total:
            raise ValueError(f"{slots} slots, but {free_total} free + {used_total} used")
        if int((sizes == 0).sum()) != self.unassigned_count:
            raise ValueError("unassigned slabs and their list disagree")
