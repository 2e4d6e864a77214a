"""Shared state of the core's parts: tables, books and bounds. No IO, clock or threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvhearth.contract import Contract, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U32
from kvhearth_server.core.actions import Action, Mark, SlabSized
from kvhearth_server.core.events import EventLogs
from kvhearth_server.core.groups import Group, Groups
from kvhearth_server.core.index import Chains, Index
from kvhearth_server.core.lower_tier import LowerTier, WritebackQueue
from kvhearth_server.core.namespaces import Namespace, Namespaces, check_epoch
from kvhearth_server.core.policies import PolicySet
from kvhearth_server.core.slot_table import Geometry, Pick, SlabPool, SlotTable, State


@dataclass(frozen=True)
class Limits:
    """Bounds of the core (see the settings of the same names)."""

    held_fraction_max: float = 0.8
    stock_fraction_max: float = 0.25
    pinned_fraction_max: float = 0.5
    keys_max: int = 8192
    sessions_max: int = 256
    namespaces_max: int = 1024
    leases_max: int = 4096
    leased_slots_max: int = 1 << 24
    """Slots of all leases on one tenant's segment, a slot once per lease: their lists take 4 bytes
    each.
    """
    pins_max: int = 1024
    pinned_slots_max: int = 1 << 22
    """Slots of all pins on one tenant's segment, a slot once per pin: their lists take 8 bytes
    each.
    """
    tenant_pins_max: int = 1 << 14
    """Pins on one tenant's segment: one without any slot takes 500 bytes, too."""
    pin_ttl_max_s: float = 86400.0
    namespace_quota_bytes: int | None = None


Account = Literal["reserved", "committed", "quarantined", "loading", "held", "pinned"]


@dataclass
class SegmentBooks:
    """Bytes of one segment.

    ``held`` is the part of ``committed`` that a lease or a write to a slower tier keeps from
    eviction, ``pinned`` the part that pins keep until nothing else can be evicted; a slot may be in
    both. ``leased_slots`` are slots, not bytes; a slot counts once for each lease on it.
    """

    capacity: int
    reserved: int = 0
    committed: int = 0
    quarantined: int = 0
    loading: int = 0
    held: int = 0
    pinned: int = 0
    leased_slots: int = 0

    @property
    def bound(self) -> int:
        """Bytes that eviction could not take now; the quantity that the global cap bounds."""
        return self.reserved + self.quarantined + self.loading + self.held

    @property
    def free(self) -> int:
        """Unused bytes (slack inside slabs included)."""
        return self.capacity - self.reserved - self.committed - self.quarantined - self.loading


class CoreState:
    """The daemon's whole state; only the core's modules change it."""

    def __init__(
        self,
        geometry: Geometry,
        limits: Limits,
        generation: U32,
        hash_seed: int = 0,
        slab_nodes: I64 | None = None,
    ) -> None:
        self.table = SlotTable(geometry, generation)
        if slab_nodes is not None:
            self.table.slab_node[:] = slab_nodes
        self.actions: list[Action] = []
        self.pools = [
            SlabPool(self.table, i, self._slab_sized) for i in range(len(geometry.segments))
        ]
        self.segment_of = {s.tenant: i for i, s in enumerate(geometry.segments)}
        self.index = Index(geometry.slot_count, hash_seed, self.table.child)
        self.chains = Chains(self.table)
        self.writeback_queue = WritebackQueue(self.table, self.count)
        self.lower_tier: LowerTier | None = None
        self.policies = PolicySet(geometry.slot_count, limits.namespaces_max)
        self.namespaces = Namespaces(
            limits.namespaces_max,
            limits.namespace_quota_bytes,
            self.policies.drop,
            tenants=len(geometry.segments),
        )
        self.groups = Groups()
        self.books = [
            SegmentBooks(geometry.segment_bytes(i)) for i in range(len(geometry.segments))
        ]
        self.limits = limits
        """Bounds, which may change while serving; what exceeds them stays until it ends."""
        self.events = EventLogs(len(geometry.segments))
        self.counts: dict[tuple[str, str], int] = {}
        self.evicted_at: list[U32] = []
        self.evictions: dict[tuple[int, str], int] = {}
        self.retained_blocks = 0
        """Blocks with a pin."""
        self.clock = 0
        self.sequence = 0
        self.release_epoch = 0

    def part(self, total: int) -> int:
        """A tenant's part of a bound that all tenants have in equal parts."""
        return max(1, total // len(self.segment_of))

    def book(self, segment: int, account: Account, slots: Pick, sign: int) -> int:
        """Book slots of a segment into (+1) or out of (-1) an account; returns their bytes."""
        size, books = self.table.total_bytes(slots), self.books[segment]
        setattr(books, account, getattr(books, account) + sign * size)
        return size

    def _slab_sized(self, slab: int, slot_bytes: int) -> None:
        self.actions.append(SlabSized(slab, slot_bytes))

    def bill(self, number: int, size: int) -> None:
        """Charge a namespace bytes (or give them back); number 0 is no namespace."""
        if number:
            self.namespaces.get(number).used_bytes += size

    def take_actions(self) -> list[Action]:
        """Return the actions that the shell must perform now, in order."""
        actions, self.actions = self.actions, []
        return actions

    def take_counts(self) -> dict[tuple[str, str], int]:
        """Return the counters, by (name, label), since the last call."""
        counts, self.counts = self.counts, {}
        return counts

    def take_evicted(self) -> list[U32]:
        """Return the logical times of last use of the blocks evicted since the last call."""
        evicted, self.evicted_at = self.evicted_at, []
        return evicted

    def take_evictions(self) -> dict[tuple[int, str], int]:
        """Return the blocks evicted since the last call, by namespace number and cause."""
        evictions, self.evictions = self.evictions, {}
        return evictions

    def count(self, name: str, amount: int = 1, label: str = "") -> None:
        """Add to a counter of the shell's metrics."""
        if amount:
            place = (name, label)
            self.counts[place] = self.counts.get(place, 0) + amount

    def count_retained_hits(self, heads: Pick) -> None:
        """Count the blocks of a hit that a pin has kept."""
        if self.retained_blocks:
            self.count("retained_hit_blocks", int(np.count_nonzero(self.table.pins[heads])))

    def count_all(self, amounts: dict[tuple[str, str], int]) -> None:
        """Add to several counters, by name and label; no amount is zero."""
        counts = self.counts
        for place, amount in amounts.items():
            counts[place] = counts.get(place, 0) + amount

    def tick(self) -> int:
        """Return a logical time that rises with every call, for ages of slabs.

        It wraps after 2**32 calls.
        """
        self.clock = (self.clock + 1) & 0xFFFFFFFF
        return self.clock

    def group_of(self, session: int) -> Group:
        """The living group of a session.

        Raises:
            KVHearthError: ``group_gone``.
        """
        group = self.groups.attached_of(session)
        if group is None:
            raise KVHearthError(Reason.GROUP_GONE, "this session's group has ended; attach again")
        return group

    def current(self, session: int, epoch: int) -> tuple[Group, Namespace]:
        """The living group of a session, and its namespace, if that has this weights epoch.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``.
        """
        group = self.group_of(session)
        namespace = self.namespaces.get(group.namespace)
        check_epoch(namespace, epoch)
        return group, namespace

    def check_count(self, blocks: int) -> None:
        """Refuse a call that names too many blocks.

        Raises:
            KVHearthError: ``too_many_keys``.
        """
        if blocks > (most := self.limits.keys_max):
            text = f"{blocks} blocks in one call, at most {most}"
            raise KVHearthError(Reason.TOO_MANY_KEYS, text)

    def slot_bytes(self, spec: GroupSpec) -> int:
        """Slot size of a group's shards."""
        return self.table.geometry.slot_bytes_for(spec.page_bytes)

    def block_bytes(self, namespace: Namespace, kv_group: int) -> int:
        """Memory that a block of a namespace's KV group takes.

        Raises:
            KVHearthError: ``bad_group``.
        """
        spec = group_spec(namespace.contract, kv_group)
        return spec.shards * self.slot_bytes(spec)

    def free_slots(self, segment: int, slots: I64) -> None:
        """Free slots that are in no books any more; the caller has bumped their generation."""
        if not len(slots):
            return
        self.table.state[slots] = State.FREE
        self.table.owner[slots] = 0
        self.table.flags[slots] = 0
        self.table.sibling[slots] = 0
        self.table.head[slots] = 0
        self.table.copy_state[slots] = 0
        self.books[segment].capacity -= self.pools[segment].give(slots)
        self.actions.append(Mark(slots, State.FREE))
        self.release_epoch += 1


def group_spec(contract: Contract, kv_group: int) -> GroupSpec:
    """The spec of a KV group.

    Raises:
        KVHearthError: ``bad_group``.
    """
    if not 0 <= kv_group < len(contract.groups):
        raise KVHearthError(
            Reason.BAD_GROUP,
            f"group {kv_group} is not one of the contract's {len(contract.groups)}",
        )
    return contract.groups[kv_group]


def require(condition: object, reason: Reason, message: Callable[[], str] | str) -> None:
    """Raise a domain error unless ``condition`` holds."""
    if not condition:
        raise KVHearthError(reason, message if isinstance(message, str) else message())
