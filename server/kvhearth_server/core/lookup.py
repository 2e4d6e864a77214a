"""Lookups and leases: the length that a request can be restored to, over all KV groups.

A hit of ``L`` tokens needs all blocks before ``L`` of a full-attention group, the blocks that cover
the last ``window - 1`` tokens before ``L`` of a sliding window, and the one block that ends at
``L`` of a state group.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, I64, U8, U32, Bools, Records, Tier
from kvhearth_server.core.groups import Group
from kvhearth_server.core.holds import drop_lease, hold, hold_room, newly_held_bytes
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.namespaces import Namespace, Traffic
from kvhearth_server.core.removal import Cause, remove_blocks
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import Pick, State, all_zero, ascending, numbers
from kvhearth_server.core.state import CoreState, group_spec, require


def window_blocks(spec: GroupSpec) -> int:
    """Number of blocks that a token right after a boundary can see in a sliding-window group."""
    return -(-(spec.window_tokens - 1) // spec.block_tokens)


def hit_blocks(spec: GroupSpec) -> int:
    """Number of blocks before its end that a hit needs; 0 for all."""
    if spec.kind is GroupKind.FULL:
        return 0
    return 1 if spec.kind is GroupKind.MAMBA else max(1, window_blocks(spec))


def usable_boundaries(spec: GroupSpec, ready: Bools) -> Bools:
    """For k = 0..n: whether this group can be restored up to block boundary k; shape (n + 1,)."""
    count = len(ready)
    boundaries = np.ones(count + 1, np.bool_)
    if spec.kind is GroupKind.FULL:
        holes = np.flatnonzero(~ready)
        run = int(holes[0]) if len(holes) else count
        boundaries[run + 1 :] = False
    elif spec.kind is GroupKind.MAMBA:
        boundaries[1:] = ready
    else:
        position = np.arange(1, count + 1)
        last_hole = np.maximum.accumulate(np.where(ready, 0, position))
        boundaries[1:] = position - last_hole >= np.minimum(window_blocks(spec), position)
    return boundaries


def hit_boundaries(groups: list[tuple[GroupSpec, Bools]]) -> I64:
    """Token counts L > 0 at which every group can be restored, longest first.

    A lookup uses the longest; the shorter ones serve when the longest cannot be leased.
    """
    if not groups:
        return np.zeros(0, np.int64)
    spec, ready = groups[0]
    if len(groups) == 1 and spec.kind is GroupKind.FULL:
        # Most models, where this is most of a lookup's time: every boundary up to the first hole.
        run = len(ready)
        if np.count_nonzero(ready) < run:  # on booleans, several times as fast as `all`
            run = int(ready.argmin())
        tokens = spec.block_tokens
        return np.arange(run * tokens, 0, -tokens)
    step = math.lcm(*(spec.block_tokens for spec, _ in groups))
    limit = min(len(ready) * spec.block_tokens for spec, ready in groups) // step
    if not limit:
        return np.zeros(0, np.int64)
    good = np.ones(limit + 1, np.bool_)
    for spec, ready in groups:
        blocks = step // spec.block_tokens
        good &= usable_boundaries(spec, ready)[: limit * blocks + 1 : blocks]
    good[0] = False
    return np.flatnonzero(good)[::-1].astype(np.int64) * step


def blocks_needed(spec: GroupSpec, hit_tokens: int) -> slice:
    """The blocks of a group that a hit of ``hit_tokens`` loads."""
    end = hit_tokens // spec.block_tokens
    if spec.kind is GroupKind.FULL:
        return slice(0, end)
    if spec.kind is GroupKind.MAMBA:
        return slice(max(0, end - 1), end)
    return slice(max(0, end - window_blocks(spec)), end)


_NONE = slice(0, 0)


# Each access to an enumeration member by name costs a search.
_SUMMED, _FULL = int(State.SUMMED), GroupKind.FULL
_SUMMED_BYTE = bytes([State.SUMMED])
"""A SUMMED state as the table's column holds it."""
_ONE = np.uint32(1)
_TIER = np.array([Tier.NOWHERE, Tier.DRAM], np.uint8)
"""Tier of a block, by whether it is present."""
_SHARED = 1024
"""Number of blocks up to which uniform answers share arrays that are made once."""
_YES, _IN_DRAM = np.ones(_SHARED, np.bool_), np.full(_SHARED, Tier.DRAM, np.uint8)
for _shared in (_YES, _IN_DRAM):
    _shared.setflags(write=False)


class KeysItem(NamedTuple):
    """Keys of one KV group, in chain order."""

    kv_group: int
    keys: Sequence[bytes]


class Presence(NamedTuple):
    """Answer for one KV group; arrays of shape (n,), extents (leased x shards,).

    Only if all blocks are present, ready in memory and leased may one array serve as all three.
    """

    kv_group: int
    present: Bools
    ready: Bools
    leased: Bools
    tiers: U8
    extents: Records

    @classmethod
    def of_whole(cls, kv_group: int, count: int, extents: Records) -> Presence:
        """Make the answer for blocks of one shard each that are all ready; ``extents`` is empty if
        none is leased.
        """
        if count <= _SHARED:
            yes, in_dram = _YES[:count], _IN_DRAM[:count]
        else:
            yes, in_dram = np.ones(count, np.bool_), np.full(count, Tier.DRAM, np.uint8)
        leased = yes if len(extents) else np.zeros(count, np.bool_)
        return cls(kv_group, yes, yes, leased, in_dram, extents)


class Found(NamedTuple):
    """Answer to a lookup; ``short`` tells why less was leased than could be restored."""

    lease_id: int
    hit_tokens: int
    groups: list[Presence]
    short: Reason | None
    promotion_queue: list[PromotionRequest]
    """Blocks on slower tiers that would make the hit longer."""
    asking: bool = False
    """Whether a shared tier is asked about keys; a later lookup may find more."""


class MissCause(enum.StrEnum):
    """Cause for which a key was not served."""

    ABSENT = "absent"
    EPOCH = "epoch"
    NOT_SUMMED = "not_summed"


# Names, because an attribute of an enumeration costs more and every lookup counts.
_ABSENT, _EPOCH, _NOT_SUMMED = MissCause


@dataclass(frozen=True)
class _Seen:
    """One KV group's resolved keys.

    ``heads`` are -1 for none; ``present`` marks current blocks in memory, ``ready`` those that may
    be served, ``lower_tier`` those on a slower tier only (None: there are none), ``remote`` those
    of them that only a shared tier has, ``asking`` those that a shared tier is asked about.
    """

    kv_group: int
    spec: GroupSpec
    heads: I64
    present: Bools
    ready: Bools
    lower_tier: Bools | None
    remote: Bools | None = None
    asking: Bools | None = None


class PrefixFastPath:
    """Fast path of ``Reading.lookup`` for a group that has all keys."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def lookup(
        self,
        session: int,
        epoch: int,
        item: KeysItem,
        lease_id: int,
        now: float,
        *,
        released: bool = False,
    ) -> Found | None:
        """Lease the blocks of all keys unless ``lease_id`` is 0, mark them as used and count the
        lookup, with a lease that was ``released`` already.

        Returns None, with nothing changed, if the general path must decide.
        """
        state, table, (kv_group, keys) = self._state, self._state.table, item
        group = state.group_of(session)
        namespace = state.namespaces.get(group.namespace)
        groups, count = namespace.contract.groups, len(keys)
        if epoch != namespace.epoch or not count or not 0 <= kv_group < len(groups):
            return None
        spec = groups[kv_group]
        if spec.kind is not _FULL or spec.shards > 1 or not self._may_lease(group, lease_id, count):
            return None
        found = state.index.find_rows(namespace.number, kv_group, keys)
        if found is None:
            return None
        rows = found if isinstance(found, slice) else _each_once(found)
        if rows is None or not self._are_served(rows, count, namespace, kv_group):
            return None
        if lease_id and not self._hold(group, rows, count, state.slot_bytes(spec)):
            return None
        self._mark_used(rows)
        tokens = count * spec.block_tokens
        self._count(count, count if lease_id or released else 0, spec.page_bytes, tokens)
        state.count_retained_hits(rows)
        namespace.traffic.hit_keys += count
        count_tokens(group, namespace, tokens, tokens)
        if not lease_id:
            extents = np.empty(0, EXTENT_DTYPE)
        elif isinstance(found, slice):
            extents = table.extents_beside(found, spec.page_bytes)
        else:
            extents = table.extents(found, spec.page_bytes, summed=True)
        if lease_id:
            group.leases[lease_id] = numbers(rows)
            group.leased_at[lease_id] = now
        return Found(lease_id, tokens, [Presence.of_whole(kv_group, count, extents)], None, [])

    def _may_lease(self, group: Group, lease_id: int, count: int) -> bool:
        limits, books = self._state.limits, self._state.books[group.segment]
        if count > limits.keys_max:
            return False
        if not lease_id:
            return True
        if lease_id in group.leases or lease_id in group.released_early:
            return False
        if len(group.leases) >= limits.leases_max:
            return False
        return books.leased_slots + count <= limits.leased_slots_max

    def _are_served(self, rows: Pick, count: int, namespace: Namespace, kv_group: int) -> bool:
        # Bytes are compared at once; numbers cost several times as much, mostly numpy's own
        # overhead.
        table = self._state.table
        for column, word in (
            (table.state, _SUMMED_BYTE),
            (table.group, bytes([kv_group])),
            (table.namespace, namespace.number.to_bytes(2, "little")),
            (table.epoch, namespace.epoch.to_bytes(4, "little")),
        ):
            if column[rows].tobytes() != word * count:
                return False
        return True

    def _hold(self, group: Group, rows: Pick, count: int, slot_bytes: int) -> bool:
        """Count one more lease on each; False if that would exceed the cap on held bytes."""
        state, table = self._state, self._state.table
        refs = table.refs[rows]
        loose = all_zero(refs)
        free = count if loose else count - int(np.count_nonzero(refs))
        if free * slot_bytes > hold_room(state, group.segment):
            return False
        books = state.books[group.segment]
        books.held += free * slot_bytes
        books.leased_slots += count
        table.refs[rows] = 1 if loose else refs + _ONE
        return True

    def _mark_used(self, rows: Pick) -> None:
        state = self._state
        state.policies.touch(rows)
        state.table.used_at[rows] = state.tick()
        if state.writeback_queue.follows:
            state.writeback_queue.used(numbers(rows))

    def _count(self, count: int, leased: int, page_bytes: int, tokens: int) -> None:
        self._state.count_all(
            {
                ("leased_keys", ""): leased,
                ("leased_bytes", ""): leased * page_bytes,
                ("lookups", ""): 1,
                ("lookup_keys", ""): count,
                ("hit_keys", ""): count,
                ("asked_tokens", ""): tokens,
                ("hit_tokens", ""): tokens,
            }
        )


def _each_once(heads: I64) -> Pick | None:
    """Heads in ascending order; None if one is missing (-1) or occurs twice."""
    if np.count_nonzero(heads[1:] > heads[:-1]) < len(heads) - 1:
        heads = np.sort(heads)
        if np.count_nonzero(heads[1:] == heads[:-1]):
            return None
    return ascending(heads) if heads.item(0) >= 0 else None


def count_tokens(group: Group, namespace: Namespace, asked: int, hit: int) -> None:
    """Count the tokens of a lookup for its engine and for its namespace."""
    group.asked_tokens += asked
    group.hit_tokens += hit
    traffic = namespace.traffic
    traffic.asked_tokens += asked
    traffic.hit_tokens += hit


class Reading:
    """Lookups and leases of attached schedulers."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._prefix_path = PrefixFastPath(state)

    def lookup(
        self,
        session: int,
        epoch: int,
        items: list[KeysItem],
        lease_id: int,
        *,
        now: float = 0.0,
        portion: bool = False,
        joins: bool = False,
        released: bool = False,
    ) -> Found:
        """Find present blocks and the longest hit, and lease the blocks that a load of it needs.

        Args:
            lease_id: the client's name for the lease; 0 requests none.
            now: time from which the lease's age is counted.
            portion: the keys are some of a request's, of one group.
            joins: what is leased joins the lease, which exists unless it was released.
            released: without ``lease_id``; a lease began and ended earlier, and is counted.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``, ``bad_group``, ``too_many_keys``,
                ``too_many_leases``, ``lease_exists``.
        """
        state = self._state
        if (lease_id or not portion) and not joins and len(items) == 1:
            found = self._prefix_path.lookup(
                session, epoch, items[0], lease_id, now, released=released
            )
            if found is not None:
                return found
        group, namespace, seen = self._resolve(session, epoch, items)
        if lease_id and not joins:
            self._check_lease(group, lease_id)
        boundaries = hit_boundaries([(one.spec, one.ready) for one in seen])
        hit, slots, short = self._affordable(group, seen, boundaries, bool(lease_id))
        needs = [blocks_needed(one.spec, hit) for one in seen]
        for one in seen:
            self._mark_used(one.heads[one.present])
            state.count_retained_hits(one.heads[one.ready])
        withdrawn = lease_id in group.released_early or (joins and lease_id not in group.leases)
        groups = [
            self._presence(one, need if lease_id and not withdrawn else _NONE)
            for one, need in zip(seen, needs, strict=True)
        ]
        granted = 0
        if lease_id and hit and not withdrawn:
            if joins:
                slots = group.leases.fresh(lease_id, slots)
            hold(state, group.segment, slots)
            if joins:
                group.leases.join(lease_id, slots)
            else:
                group.leases[lease_id], group.leased_at[lease_id] = slots, now
            granted = lease_id
        if granted or (released and hit):
            self._count_leased(seen, needs)
        state.count("lookups")
        self._count_keys(namespace.traffic, seen)
        self._count_tokens(group, namespace, seen, hit, lease_id if portion else None)
        asking = any(one.asking is not None for one in seen)
        promotion_queue = self._promotion_queue(namespace, items, seen)
        return Found(granted, hit, groups, short, promotion_queue, asking)

    def _count_tokens(
        self,
        group: Group,
        namespace: Namespace,
        seen: list[_Seen],
        hit: int,
        lease_of_portion: int | None,
    ) -> None:
        """Count the tokens of a lookup. Those of a request in portions are counted once, in its
        first group of full attention, and hit where they are leased.
        """
        counted = seen
        if lease_of_portion is not None:
            kinds = [spec.kind for spec in namespace.contract.groups]
            first = kinds.index(GroupKind.FULL) if GroupKind.FULL in kinds else 0
            counted = [one for one in seen if one.kv_group == first]
            hit = hit if counted and lease_of_portion else 0
        asked = max((len(one.heads) * one.spec.block_tokens for one in counted), default=0)
        self._state.count("asked_tokens", asked)
        self._state.count("hit_tokens", hit)
        count_tokens(group, namespace, asked, hit)

    def presence(
        self, session: int, epoch: int, items: list[KeysItem]
    ) -> tuple[list[Presence], list[PromotionRequest], bool]:
        """Report present blocks, without a lease, those that could be promoted, and whether a
        shared tier is asked about others.
        """
        _, namespace, seen = self._resolve(session, epoch, items)
        groups = [self._presence(one, _NONE) for one in seen]
        asking = any(one.asking is not None for one in seen)
        return groups, self._promotion_queue(namespace, items, seen), asking

    def touch(self, session: int, epoch: int, items: list[KeysItem]) -> int:
        """Mark blocks as used; returns the number of present ones."""
        _, _, seen = self._resolve(session, epoch, items)
        parts = [np.zeros(0, np.int64), *(one.heads[one.present] for one in seen)]
        heads = np.concatenate(parts)
        self._mark_used(heads)
        return len(heads)

    def release(self, session: int, lease_ids: list[int]) -> None:
        """End leases. Known ones end in any case.

        Raises:
            KVHearthError: ``group_gone``; ``unknown_lease`` naming the ids that the group does not
                hold.
        """
        group = self._state.group_of(session)
        unknown = [i for i in lease_ids if not drop_lease(self._state, group, i)]
        for lease_id in unknown:
            group.note_early_release(lease_id)
        if unknown:
            text = ", ".join(map(str, unknown[:8]))
            raise KVHearthError(Reason.UNKNOWN_LEASE, f"this group holds no lease {text}")

    def suspects(self, session: int, items: list[SlotsItem]) -> list[I64]:
        """Blocks of this session's namespace that a reader reported as wrong and that still live.

        Each occurs once; see ``SlotTable.blocks_of``. The shell checksums them before it believes
        the report, then calls ``remove_bad``.
        """
        table = self._state.table
        group = self._state.group_of(session)
        parts = [np.zeros(0, np.int64)]
        for item in items:
            good = table.in_use(item.slots)
            slots = item.slots[good]
            live = table.generation[slots] == item.generations[good]
            live &= table.state[slots] == _SUMMED
            links = table.head[slots[live]].astype(np.int64)
            parts.append(np.where(links > 0, links - 1, slots[live]))
        heads = np.unique(np.concatenate(parts))
        return table.blocks_of(heads[table.namespace[heads] == group.namespace])

    def remove_bad(self, heads: I64, generations: U32) -> int:
        """Remove distinct blocks whose bytes do not match their checksums.

        Blocks that are gone already are passed over. Returns the number of removed blocks.
        """
        table = self._state.table
        live = (table.generation[heads] == generations) & (table.state[heads] == _SUMMED)
        removed = int(np.count_nonzero(live))
        if removed:
            self._state.count("checksum_failures", removed, "reader")
            remove_blocks(self._state, heads[live], Cause.CHECKSUM)
        return removed

    def _resolve(
        self, session: int, epoch: int, items: list[KeysItem]
    ) -> tuple[Group, Namespace, list[_Seen]]:
        state, table = self._state, self._state.table
        group, namespace = state.current(session, epoch)
        state.check_count(sum(len(item.keys) for item in items))
        seen = []
        for item in items:
            spec = group_spec(namespace.contract, item.kv_group)
            heads = state.index.find(namespace.number, item.kv_group, item.keys)
            safe = np.maximum(heads, 0)
            present = table.epoch[safe] == namespace.epoch
            present &= heads >= 0
            ready = table.state[safe] == _SUMMED
            ready &= present
            one = _Seen(item.kv_group, spec, heads, present, ready, None)
            if state.lower_tier is not None and np.count_nonzero(present) < len(present):
                below = state.lower_tier.ask(namespace, item.kv_group, item.keys, present)
                if below is not None:
                    one = _Seen(item.kv_group, spec, heads, present, ready, *below)
            seen.append(one)
        kinds = {one.kv_group for one in seen}
        require(len(kinds) == len(seen), Reason.BAD_GROUP, "a group is asked for twice in one call")
        return group, namespace, seen

    def _count_leased(self, seen: list[_Seen], needs: list[slice]) -> None:
        for one, need in zip(seen, needs, strict=True):
            count, spec = need.stop - need.start, one.spec
            self._state.count("leased_keys", count)
            self._state.count("leased_bytes", count * spec.shards * spec.page_bytes)

    def _count_keys(self, traffic: Traffic, seen: list[_Seen]) -> None:
        """Count each requested key as a hit, or as a miss for one reason."""
        count = self._state.count
        for one in seen:
            asked, found = len(one.heads), int(np.count_nonzero(one.heads >= 0))
            traffic.miss_keys += asked
            current, ready = np.count_nonzero(one.present), np.count_nonzero(one.ready)
            count("lookup_keys", asked)
            count("hit_keys", int(ready))
            traffic.hit_keys += int(ready)
            traffic.miss_keys -= int(ready)
            if one.lower_tier is not None:
                remote = 0 if one.remote is None else int(np.count_nonzero(one.remote))
                below = int(np.count_nonzero(one.lower_tier))
                count("below_keys", below - remote)
                count("remote_keys", remote)
                traffic.below_keys += below
                traffic.miss_keys -= below
                outdated = int(np.count_nonzero(one.lower_tier & (one.heads >= 0)))
                asked -= below
                found -= outdated
            count("miss_keys", asked - found, _ABSENT)
            count("miss_keys", found - int(current), _EPOCH)
            count("miss_keys", int(current - ready), _NOT_SUMMED)

    def _check_lease(self, group: Group, lease_id: int) -> None:
        require(
            lease_id not in group.leases,
            Reason.LEASE_EXISTS,
            f"lease {lease_id} exists; release it or choose another id",
        )
        require(
            len(group.leases) < self._state.limits.leases_max,
            Reason.TOO_MANY_LEASES,
            f"the group holds {len(group.leases)} leases; release some",
        )

    def _affordable(
        self, group: Group, seen: list[_Seen], boundaries: I64, leasing: bool
    ) -> tuple[int, I64, Reason | None]:
        """The longest affordable boundary, its slots, and the bound that made it shorter.

        Without a lease it is the longest boundary, without slots.
        """
        none = np.zeros(0, np.int64)
        if not len(boundaries):
            return 0, none, None
        hit = int(boundaries[0])
        if not leasing:
            return hit, none, None
        room = hold_room(self._state, group.segment)
        slots = self._lease_slots(seen, hit)
        if newly_held_bytes(self._state, slots) <= room:
            return hit, slots, None
        low, high = 0, len(boundaries)
        while low < high:
            middle = (low + high) // 2
            slots = self._lease_slots(seen, int(boundaries[middle]))
            if newly_held_bytes(self._state, slots) <= room:
                high = middle
            else:
                low = middle + 1
        if low == len(boundaries):
            return 0, none, Reason.HELD_CAP
        hit = int(boundaries[low])
        return hit, self._lease_slots(seen, hit), Reason.HELD_CAP

    def _lease_slots(self, seen: list[_Seen], hit: int) -> I64:
        """All shards of the blocks that a hit needs, each once even for repeated keys."""
        table = self._state.table
        parts = []
        for one in seen:
            need = blocks_needed(one.spec, hit)
            parts.append(table.all_shards(one.heads[need], one.spec.shards).reshape(-1))
        slots = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if not np.count_nonzero(slots[1:] <= slots[:-1]):
            return slots
        return np.unique(slots)

    def _presence(self, one: _Seen, need: slice) -> Presence:
        table = self._state.table
        leased = np.zeros(len(one.heads), np.bool_)
        leased[need] = True
        slots = table.all_shards(one.heads[need], one.spec.shards)
        extents = table.extents(slots, one.spec.page_bytes, summed=True)
        tiers, present = _TIER[one.present.view(np.uint8)], one.present
        if one.lower_tier is not None:
            tiers[one.lower_tier] = Tier.SSD
            present = present | one.lower_tier
        for flags in (one.remote, one.asking):
            if flags is not None:
                tiers[flags] = Tier.REMOTE
        return Presence(one.kv_group, present, one.ready, leased, tiers, extents)

    def _promotion_queue(
        self, namespace: Namespace, items: list[KeysItem], seen: list[_Seen]
    ) -> list[PromotionRequest]:
        """Promotion requests for the longest hit that all tiers together allow."""
        if not any(one.lower_tier is not None and one.lower_tier.any() for one in seen):
            return []
        either = [
            one.ready if one.lower_tier is None else one.ready | one.lower_tier for one in seen
        ]
        pairs = [(one.spec, there) for one, there in zip(seen, either, strict=True)]
        boundaries = hit_boundaries(pairs)
        if not len(boundaries):
            return []
        promotion_queue = []
        for item, one in zip(items, seen, strict=True):
            if one.lower_tier is None:
                continue
            need = blocks_needed(one.spec, int(boundaries[0]))
            rows = np.flatnonzero(one.lower_tier[need]) + need.start
            keys = [item.keys[row] for row in rows.tolist()]
            before = [item.keys[row - 1] if row else b"" for row in rows.tolist()]
            if keys:
                promotion_queue.append(
                    PromotionRequest(namespace, one.kv_group, one.spec, keys, before)
                )
        return promotion_queue

    def _mark_used(self, heads: I64) -> None:
        if len(heads):
            self._state.policies.touch(heads)
            self._state.table.used_at[heads] = self._state.tick()
            self._state.writeback_queue.used(heads)
