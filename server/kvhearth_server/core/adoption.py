"""Adoption of the blocks of an earlier run, as the shell read them from the journal."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvhearth.model import FLAG_VERIFY, I64, Bools, Records
from kvhearth_server.core.actions import Mark, SlabSized, Sum
from kvhearth_server.core.groups import Group
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState


@dataclass(frozen=True)
class AdoptedBlocks:
    """Complete blocks of one namespace and group, oldest first.

    ``slots`` (n, shards); ``parents`` (n,) heads or -1; ``summed`` (n,); ``checksums`` (n, shards)
    of 16 bytes, meaningless where not summed; ``sequences`` (n,), the numbers of the commits.
    """

    namespace: int
    kv_group: int
    slots: I64
    parents: I64
    keys: list[bytes]
    summed: Bools
    checksums: Records
    sequences: npt.NDArray[np.uint64]


class DropCause(enum.StrEnum):
    """Cause for which a slot of an earlier run is not taken over."""

    CONTRACT = "contract"
    DUPLICATE = "duplicate"
    EPOCH = "epoch"
    HEADER = "header"
    INCOMPLETE = "incomplete"
    OWNER = "owner"
    READERS = "readers"
    SLAB = "slab"
    STATE_WORD = "state_word"


@dataclass
class Adoption:
    """Result of reading the journal.

    ``slabs``: (slab, slot size) in use; ``damaged``: those of them whose slot size is unknown, each
    taken as one slot. ``held``: slots by the number of the group that may still write to them; 0
    for an unknown group. ``orphaned_loads``: slots that the kernel may still write to for an
    earlier run. ``dropped``: slots that become free, with the causes counted in ``causes``.
    """

    slabs: list[tuple[int, int]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    blocks: list[AdoptedBlocks] = field(default_factory=list)
    held: dict[int, I64] = field(default_factory=dict)
    orphaned_loads: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    dropped: list[I64] = field(default_factory=list)
    causes: Counter[DropCause] = field(default_factory=Counter)
    sequence: int = 0


def adopt(state: CoreState, found: Adoption, groups: dict[int, Group]) -> None:
    """Fill a fresh core; ``groups`` are the restored holders of ``found.held`` by number."""
    damaged = set(found.damaged)
    _restore_slabs(state, found)
    for part in found.blocks:
        _restore_blocks(state, part)
    for number, slots in found.held.items():
        _restore_held(state, groups[number], slots)
    state.sequence = max(state.sequence, found.sequence)
    # The journal already has the sizes of all slabs except damaged ones. Those are written last, so
    # that after a crash before this point they are found damaged again.
    sized = [a for a in state.take_actions() if isinstance(a, SlabSized) and a.slab in damaged]
    state.actions += [
        Mark(slots, State.QUARANTINED, number) for number, slots in found.held.items()
    ]
    if found.dropped:
        state.actions.append(Mark(np.concatenate(found.dropped), State.FREE))
    state.actions += sized
    for part in found.blocks:
        if not part.summed.all():
            slots = part.slots[~part.summed]
            state.actions.append(Sum(slots, state.table.generation[slots].copy()))
    for cause, count in found.causes.items():
        state.count("adoption_dropped", count, cause)


def _restore_slabs(state: CoreState, found: Adoption) -> None:
    parts = [part.slots.reshape(-1) for part in found.blocks] + list(found.held.values())
    used = np.sort(np.concatenate([*parts, found.orphaned_loads]))
    stride = state.table.geometry.stride
    for slab, slot_bytes in found.slabs:
        start, end = np.searchsorted(used, (slab * stride, (slab + 1) * stride))
        pool = state.pools[int(state.table.slab_segment[slab])]
        pool.adopt(slab, slot_bytes, used[start:end])


def _restore_blocks(state: CoreState, part: AdoptedBlocks) -> None:
    table = state.table
    namespace = state.namespaces.get(part.namespace)
    spec = namespace.contract.groups[part.kv_group]
    every, heads = part.slots.reshape(-1), part.slots[:, 0]
    table.namespace[every] = part.namespace
    table.group[every] = part.kv_group
    table.epoch[every] = namespace.epoch
    if part.slots.shape[1] > 1:
        table.sibling[part.slots[:, :-1]] = part.slots[:, 1:] + 1
        table.head[part.slots[:, 1:]] = part.slots[:, :1] + 1
    table.checksum[every] = part.checksums.reshape(-1)
    table.state[part.slots] = np.where(part.summed, State.SUMMED, State.COMMITTED)[:, None]
    table.flags[every] = FLAG_VERIFY
    segment = state.segment_of[namespace.tenant]
    namespace.used_bytes += state.book(segment, "committed", every, +1)
    namespace.blocks += len(heads)
    state.index.bind(part.namespace, part.kv_group, part.keys, heads)
    state.chains.link_many(heads, part.parents)
    state.table.sequence[heads] = part.sequences
    state.writeback_queue.offer(heads[part.summed])
    # Commits were leaf first among blocks of one age. Ordered by age alone, the root would be
    # coldest; the links above keep the leaf-first rule.
    state.policies.insert(part.namespace, state.slot_bytes(spec), heads, None)
    state.count("adopted_blocks", len(heads))


def _restore_held(state: CoreState, group: Group, slots: I64) -> None:
    table = state.table
    table.state[slots] = State.QUARANTINED
    table.owner[slots] = group.number
    size = state.book(group.segment, "quarantined", slots, +1)
    group.quarantined_bytes += size
    group.handed.append(slots)
    group.handed_count += len(slots)
    state.bill(group.namespace, size)
    state.count("quarantined_slots", len(slots))
