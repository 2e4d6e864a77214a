"""Binding of keys to written slots: the core of a commit, after its checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, I64, U8, U32, Bools, Tier
from kvhearth_server.core.actions import Bind, Sum
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.groups import Group
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.removal import Cause, remove_blocks
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.core.state import CoreState, group_spec


class Chains(NamedTuple):
    """Chains of a commit's keys.

    Attributes:
        starts: (m,), each chain's first position, ascending from 0.
        parents: m keys before those positions; an empty one stands for none.
    """

    starts: I64
    parents: list[bytes]

    def part(self, begin: int, end: int, before: bytes) -> Chains:
        """Return the chains of the keys from ``begin`` to ``end``; ``before`` is the key before
        them.
        """
        first, last = np.searchsorted(self.starts, (begin, end)).tolist()
        starts, parents = self.starts[first:last] - begin, self.parents[first:last]
        if not len(starts) or starts[0]:
            starts, parents = np.concatenate(([0], starts)), [before, *parents]
        return Chains(starts, parents)


@dataclass(frozen=True)
class CommitItem:
    """Keys of one KV group to bind; slots (n, shards), checksums (n, shards, 16) or None.

    The keys are one chain after ``parent`` (empty: none), or several ``chains``.
    """

    kv_group: int
    keys: list[bytes]
    slots: I64
    generations: U32
    checksums: U8 | None
    parent: bytes
    chains: Chains | None = None

    def part(self, begin: int, end: int) -> CommitItem:
        """Return the commit of some of the keys; the key before them is their parent."""
        before = self.keys[begin - 1] if begin else self.parent
        return CommitItem(
            self.kv_group,
            self.keys[begin:end],
            self.slots[begin:end],
            self.generations[begin:end],
            None if self.checksums is None else self.checksums[begin:end],
            before,
            None if self.chains is None else self.chains.part(begin, end, before),
        )


class Binder:
    """Applies commit items whose slots the caller has checked."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def bind(self, group: Group, namespace: Namespace, item: CommitItem) -> Bools:
        """Apply a checked item of a group that has its slots reserved."""
        size = self._state.book(group.segment, "reserved", item.slots.reshape(-1), -1)
        group.stock_bytes -= size
        return self.place(group.segment, namespace, item)

    def place(
        self, segment: int, namespace: Namespace, item: CommitItem, *, promoted: bool = False
    ) -> Bools:
        """Bind keys to slots that are in no books yet, but are billed to the namespace.

        Slots whose keys are already bound become free.

        Args:
            promoted: the blocks come from a slower tier, where their copies stay.
        """
        state, keys = self._state, item.keys
        heads = self._current(namespace, item.kv_group, keys)
        fresh = heads < 0
        if len(keys) > 1 and len(set(keys)) != len(keys):
            first: dict[bytes, int] = {}
            for position, key in enumerate(keys):
                fresh[position] &= first.setdefault(key, position) == position
        slots = item.slots[fresh]
        spare = item.slots[~fresh].reshape(-1)
        state.release_epoch += 1  # a slab of blocks can be emptied, one of reserved slots cannot
        if len(spare):
            state.table.bump(spare)
            namespace.used_bytes -= state.table.total_bytes(spare)
            state.free_slots(segment, spare)
            state.count("duplicate_blocks", int((~fresh).sum()))
        if len(slots):
            new_keys = keys if fresh.all() else [k for k, f in zip(keys, fresh, strict=True) if f]
            sums = None if item.checksums is None else item.checksums[fresh]
            self._fill(namespace, item.kv_group, slots, sums)
            state.book(segment, "committed", slots.reshape(-1), +1)
            namespace.blocks += len(slots)
            state.index.bind(namespace.number, item.kv_group, new_keys, slots[:, 0])
            heads[fresh] = slots[:, 0]
            if len(new_keys) != len(keys):
                heads = state.index.find(namespace.number, item.kv_group, keys)
            self._chain(namespace, item, heads, fresh)
            spec = group_spec(namespace.contract, item.kv_group)
            state.policies.insert(
                namespace.number, state.slot_bytes(spec), slots[::-1, 0], new_keys[::-1]
            )
            if promoted:
                state.table.copy_state[slots[:, 0]] = CopyState.SAVED
            self._record(namespace, item.kv_group, slots, new_keys, sums is not None)
            if promoted:
                self._announce_promoted(namespace, item.kv_group, slots, new_keys)
            else:
                self._announce(namespace, item.kv_group, slots, new_keys, sums is not None)
        return fresh

    def _current(self, namespace: Namespace, kv_group: int, keys: list[bytes]) -> I64:
        """Heads of the keys that are bound, -1 for the others.

        Removes blocks of an older epoch under these keys.
        """
        state = self._state
        heads = state.index.find(namespace.number, kv_group, keys)
        old = (heads >= 0) & (state.table.epoch[heads] != namespace.epoch)
        if old.any():
            remove_blocks(state, np.unique(heads[old]), Cause.EPOCH)
            heads[old] = -1
        return heads

    def _fill(self, namespace: Namespace, kv_group: int, slots: I64, sums: U8 | None) -> None:
        table, every = self._state.table, slots.reshape(-1)
        table.namespace[every] = namespace.number
        table.group[every] = kv_group
        table.epoch[every] = namespace.epoch
        table.owner[every] = 0
        table.flags[every] = 0
        table.copy_state[every] = CopyState.NOT
        table.used_at[every] = self._state.tick()
        if slots.shape[1] > 1:
            table.sibling[slots[:, :-1]] = slots[:, 1:] + 1
            table.head[slots[:, 1:]] = slots[:, :1] + 1
        if sums is None:
            table.state[every] = State.COMMITTED
        else:
            table.checksum[every] = (
                np.ascontiguousarray(sums).view(f"V{CHECKSUM_BYTES}").reshape(-1)
            )
            table.state[every] = State.SUMMED

    def _chain(self, namespace: Namespace, item: CommitItem, heads: I64, fresh: Bools) -> None:
        """Link new blocks to their predecessors; keys come root first."""
        chains, index = self._state.chains, self._state.index
        if item.chains is not None:
            self._chain_several(namespace, item, item.chains, heads, fresh)
            return
        if item.parent:
            before = int(index.find(namespace.number, item.kv_group, [item.parent])[0])
            if before >= 0 and fresh[0] and before not in heads[fresh]:
                chains.link(before, int(heads[0]))
        if fresh.all():
            chains.link_run(heads)
            return
        for position in np.flatnonzero(fresh[1:]) + 1:
            if heads[position - 1] != heads[position]:
                chains.link(int(heads[position - 1]), int(heads[position]))

    def _chain_several(
        self, namespace: Namespace, item: CommitItem, chains: Chains, heads: I64, fresh: Bools
    ) -> None:
        """Link new blocks of several chains to their predecessors.

        Links are made one by one: predecessors may have children already, or be one another's.
        """
        state = self._state
        before = np.concatenate(([-1], heads[:-1]))
        before[chains.starts] = -1
        known = [at for at, parent in enumerate(chains.parents) if parent]
        if known:
            parents = [chains.parents[at] for at in known]
            before[chains.starts[known]] = state.index.find(
                namespace.number, item.kv_group, parents
            )
        new = set(heads[fresh].tolist())
        done: set[int] = set()
        link = state.chains.link
        for head, parent, is_new in zip(
            heads.tolist(), before.tolist(), fresh.tolist(), strict=True
        ):
            # A new block is linked after its predecessor, or two of them could be a ring.
            if is_new and parent >= 0 and parent != head and (parent in done or parent not in new):
                link(parent, head)
            done.add(head)

    def _record(
        self, namespace: Namespace, kv_group: int, slots: I64, keys: list[bytes], summed: bool
    ) -> None:
        """Number the blocks and request the writing of their headers."""
        state = self._state
        spec = group_spec(namespace.contract, kv_group)
        parents = state.table.parent[slots[:, 0]].astype(np.int64) - 1
        sequences = state.sequence + 1 + np.arange(len(slots), dtype=np.int64)
        state.sequence += len(slots)
        state.table.sequence[slots[:, 0]] = sequences
        to = State.SUMMED if summed else State.COMMITTED
        state.actions.append(
            Bind(
                slots,
                sequences,
                parents,
                spec.page_bytes,
                keys,
                namespace.number,
                kv_group,
                namespace.epoch,
                to,
            )
        )

    def _announce_promoted(
        self, namespace: Namespace, kv_group: int, slots: I64, keys: list[bytes]
    ) -> None:
        state = self._state
        size = slots.size * group_spec(namespace.contract, kv_group).page_bytes
        state.count("promoted_blocks", len(slots))
        state.count("promoted_bytes", size)
        state.events.append(EventKind.MOVED, namespace.number, kv_group, keys, tier=Tier.DRAM)

    def _announce(
        self, namespace: Namespace, kv_group: int, slots: I64, keys: list[bytes], summed: bool
    ) -> None:
        state = self._state
        state.count("stored_blocks", len(slots))
        namespace.traffic.stored_blocks += len(slots)
        state.count(
            "stored_bytes", slots.size * group_spec(namespace.contract, kv_group).page_bytes
        )
        if summed:
            state.writeback_queue.offer(slots[:, 0])
            state.count("summed_blocks", len(slots))
            state.events.append(EventKind.STORED, namespace.number, kv_group, keys, tier=Tier.DRAM)
        else:
            state.actions.append(Sum(slots, state.table.generation[slots].copy()))
