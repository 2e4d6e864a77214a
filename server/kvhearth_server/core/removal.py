"""Removal of blocks from the index: eviction, replacement, invalid bytes."""

from __future__ import annotations

import enum

import numpy as np

from kvhearth.model import I64, U8, Tier
from kvhearth_server.core.actions import Mark
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.holds import lose_pins
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.core.state import CoreState


class Cause(enum.StrEnum):
    """Cause of a removal."""

    SPACE = "space"
    SLAB = "slab"
    QUOTA = "quota"
    ASKED = "asked"
    CHECKSUM = "checksum"
    EPOCH = "epoch"


EVICTIONS = frozenset({Cause.SPACE, Cause.SLAB, Cause.QUOTA, Cause.ASKED})
"""Causes that count as evictions: the block was good, but its room was needed."""


def remove_blocks(state: CoreState, heads: I64, cause: Cause) -> None:
    """Remove distinct bound blocks of any namespaces and groups.

    Every extent of them becomes invalid at once. Slots that are still leased are quarantined until
    the lease ends, the others become free. Pins end.
    """
    state.policies.remove(state.table, heads)
    state.chains.unlink_many(heads)
    forget_blocks(state, heads, cause)


def forget_blocks(state: CoreState, heads: I64, cause: Cause) -> None:
    """Remove blocks whose heads policy and chains have already released; see ``remove_blocks``."""
    for number, kv_group, chosen in state.table.by_kind(heads):
        _forget(state, number, kv_group, chosen, cause)


def _forget(state: CoreState, number: int, kv_group: int, heads: I64, cause: Cause) -> None:
    table = state.table
    namespace = state.namespaces.get(number)
    spec = namespace.contract.groups[kv_group]
    segment = state.segment_of[namespace.tenant]
    keys = state.index.unbind(number, kv_group, heads)
    table.copy_state[heads] = CopyState.NOT
    slots = table.all_shards(heads, spec.shards).reshape(-1)
    table.bump(slots)
    size = state.book(segment, "committed", slots, -1)
    namespace.used_bytes -= size
    namespace.blocks -= len(heads)
    read = table.refs[slots] > 0
    state.book(segment, "held", slots[read], -1)
    lose_pins(state, segment, slots, "evicted" if cause in EVICTIONS else "removed")
    quarantined = slots[read]
    if len(quarantined):
        table.state[quarantined] = State.QUARANTINED
        state.book(segment, "quarantined", quarantined, +1)
        state.count("quarantined_slots", len(quarantined))
        state.actions.append(Mark(quarantined, State.QUARANTINED))
    state.free_slots(segment, slots[~read])
    state.count("evicted_blocks" if cause in EVICTIONS else "removed_blocks", len(heads), cause)
    if cause in EVICTIONS:
        namespace.traffic.evicted_blocks += len(heads)
        place = (number, str(cause))
        state.evictions[place] = state.evictions.get(place, 0) + len(heads)
        state.evicted_at.append(table.used_at[heads])
    tell_gone(state, namespace, kv_group, keys, cause)


def tiers_of(state: CoreState, namespace: Namespace, kv_group: int, keys: list[bytes]) -> U8:
    """Return the fastest tier of each key's block of the current epoch, shape (n,)."""
    tiers = np.zeros(len(keys), np.uint8)
    if state.lower_tier is not None:
        tiers[state.lower_tier.shared_has(namespace, kv_group, keys)] = Tier.REMOTE
        tiers[state.lower_tier.present(namespace, kv_group, keys)] = Tier.SSD
    heads = state.index.find(namespace.number, kv_group, keys)
    tiers[(heads >= 0) & (state.table.epoch[heads] == namespace.epoch)] = Tier.DRAM
    return tiers


def tell_gone(
    state: CoreState, namespace: Namespace, kv_group: int, keys: list[bytes], cause: str
) -> None:
    """Tell those who follow a namespace where blocks are that may have left a tier; nothing of
    those that are in memory.
    """
    if namespace.number not in state.events:
        return
    tiers = tiers_of(state, namespace, kv_group, keys)
    for tier in (Tier.SSD, Tier.REMOTE, Tier.NOWHERE):
        if names := [keys[row] for row in np.flatnonzero(tiers == tier).tolist()]:
            kind = EventKind.MOVED if tier else EventKind.REMOVED
            state.events.append(kind, namespace.number, kv_group, names, cause=cause, tier=tier)
