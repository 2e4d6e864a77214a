"""Writing of blocks: reserve, commit, abort and checksum."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from kvhearth.contract import GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import CHECKSUM_BYTES, I64, U8, U32, Bools, Tier
from kvhearth_server.core.actions import Mark, Summed
from kvhearth_server.core.commit import Binder, CommitItem
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.evictor import Evictor
from kvhearth_server.core.few_commits import FewCommits, SingleCommit
from kvhearth_server.core.groups import Group, Reservation, SlotGrant
from kvhearth_server.core.holds import hold_room
from kvhearth_server.core.membership import quarantine, take_from_quarantine
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.removal import Cause
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, group_spec, require


@dataclass(frozen=True)
class Reserved:
    """Grants of a reservation so far.

    ``short`` is the bound that made it smaller than requested (or None); ``more`` tells whether
    ``Writing.reserve_more`` has more to grant.
    """

    handed: list[SlotGrant]
    short: Reason | None
    more: bool = False


@dataclass(frozen=True)
class SlotsItem:
    """Slots of one KV group with the generations under which they were handed out, flat."""

    slots: I64
    generations: U32


class Writing:
    """Reservations, commits, aborts and checksums of attached schedulers."""

    def __init__(self, state: CoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._binder = Binder(state)
        self._few = FewCommits(state, self._binder)

    def reserve(
        self,
        session: int,
        reservation_id: int,
        epoch: int,
        wants: list[tuple[int, int]],
        evicted_max: int | None = None,
    ) -> Reserved:
        """Hand out empty slots for ``wants``, pairs of (KV group, blocks).

        Args:
            session: a scheduler's session.
            reservation_id: the client's name for it.
            epoch: weights epoch of the client.
            wants: number of blocks for each KV group.
            evicted_max: upper bound on the blocks evicted in this call. If more are needed, a part
                is handed out, and ``reserve_more`` continues.

        Raises:
            KVHearthError: ``group_incomplete``, ``group_gone``, ``stale_epoch``, ``bad_group``,
                ``too_many_keys``, ``not_reserved`` if the reservation was aborted before, or the
                bound that left nothing at all.
        """
        state = self._state
        group, namespace = self._reserving(session, epoch)
        known = group.reservations.get(reservation_id)
        aborted = reservation_id in group.released_early or (known is not None and known.in_doubt)
        require(not aborted, Reason.NOT_RESERVED, _ABORTED)
        state.check_count(sum(count for _, count in wants))
        for kv_group, _ in wants:
            group_spec(namespace.contract, kv_group)
        if known is not None and not known.left:
            return Reserved(known.handed, None)
        return self._go_on(
            group, namespace, reservation_id, known or Reservation(list(wants)), evicted_max
        )

    def reserve_more(
        self, session: int, reservation_id: int, epoch: int, evicted_max: int
    ) -> Reserved:
        """Continue a reservation; the answer includes the earlier grants.

        Raises:
            KVHearthError: as ``reserve``; ``not_reserved`` if it was aborted meanwhile.
        """
        group, namespace = self._reserving(session, epoch)
        known = group.reservations.get(reservation_id)
        if known is None or known.in_doubt:
            raise KVHearthError(Reason.NOT_RESERVED, _ABORTED)
        return self._go_on(group, namespace, reservation_id, known, evicted_max)

    def _reserving(self, session: int, epoch: int) -> tuple[Group, Namespace]:
        """The group of a session that may reserve under an epoch, and its namespace."""
        group, namespace = self._state.current(session, epoch)
        require(
            group.complete,
            Reason.GROUP_INCOMPLETE,
            f"{len(group.attached)} of the group's {group.world_size} ranks are attached",
        )
        return group, namespace

    def _go_on(
        self,
        group: Group,
        namespace: Namespace,
        reservation_id: int,
        work: Reservation,
        evicted_max: int | None,
    ) -> Reserved:
        """Grant the rest of a reservation, or a portion of it."""
        state, handed = self._state, list[SlotGrant]()
        cut = False
        while work.left and not cut:
            kv_group, count = work.left[0]
            spec = group_spec(namespace.contract, kv_group)
            slots, limit, cut = self._grant(group, namespace, spec, count, evicted_max)
            if cut:
                work.left[0] = kv_group, count - len(slots)
            else:
                work.left.pop(0)
                work.short = work.short or limit
            if len(slots):
                generations = state.table.generation[slots].copy()
                handed.append(SlotGrant(kv_group, slots, generations))
        if handed:
            every = np.concatenate([part.slots.reshape(-1) for part in handed])
            state.actions.append(Mark(every, State.RESERVED, group.number))
            state.count("reserved_slots", len(every))
        group.grant(work, handed)
        group.tidy(state.table)
        if work.handed or work.left:
            group.remember(reservation_id, work)
        elif work.short is not None:
            group.reservations.pop(reservation_id, None)
            raise KVHearthError(work.short, _SHORT_TEXT[work.short])
        return Reserved(work.handed, work.short, more=bool(work.left))

    def _grant(
        self,
        group: Group,
        namespace: Namespace,
        spec: GroupSpec,
        count: int,
        evicted_max: int | None,
    ) -> tuple[I64, Reason | None, bool]:
        """Take slots of shape (n <= count, shards) and book them as reserved.

        Returns the slots, the bound that made n smaller, and whether n is smaller because the limit
        of ``evicted_max`` evictions was reached.
        """
        state, evictor = self._state, self._evictor
        segment, size = group.segment, state.slot_bytes(spec)
        block = size * spec.shards
        capacity = state.books[segment].capacity
        bound: Reason | None = None
        cut = False
        stock_room = (
            int(capacity * state.limits.stock_fraction_max)
            - group.stock_bytes
            - group.quarantined_bytes
        )
        for room, reason in (
            (stock_room, Reason.STOCK_CAP),
            (self._beside_others(group), Reason.STOCK_CAP),
            (hold_room(state, segment), Reason.HELD_CAP),
            (self._quota_share(namespace, block), Reason.QUOTA_EXCEEDED),
        ):
            if count * block > room:
                count, bound = max(0, room // block), reason
        # Last, because it evicts: nothing is evicted for blocks that the other bounds refuse.
        room = self._quota_room(namespace, count * block, evicted_max)
        if count * block > room:
            count, bound, cut = max(0, room // block), Reason.QUOTA_EXCEEDED, evictor.cut_short
        can = evictor.make_room(segment, size, count * spec.shards, evicted_max)
        if can < count * spec.shards:
            count, bound = can // spec.shards, Reason.NO_SPACE
            cut |= evictor.cut_short
        slots = self._take(group, size, count, spec.shards)
        if len(slots):
            state.table.state[slots] = State.RESERVED
            state.table.owner[slots] = group.number
            added = state.book(segment, "reserved", slots, +1)
            group.stock_bytes += added
            namespace.used_bytes += added
        return slots.reshape(count, spec.shards), bound, cut

    def _take(self, group: Group, slot_bytes: int, count: int, shards: int) -> I64:
        """Take free slots for ``count`` blocks, flat, each shard near the rank that writes it."""
        pool = self._state.pools[group.segment]
        if not pool.has_nodes:
            return pool.take(slot_bytes, count * shards)
        nodes = group.nodes(shards)
        if len(set(nodes)) == 1:
            return pool.take(slot_bytes, count * shards, nodes[0])
        return np.stack([pool.take(slot_bytes, count, node) for node in nodes], axis=1).reshape(-1)

    def _beside_others(self, group: Group) -> int:
        """Bytes that the engine may still reserve beside the other engines of its tenant.

        An engine that is alone may reserve what the other bounds allow. Beside others it may hold
        at most as much as all of them together leave free ("dynamic threshold", Choudhury and Hahne
        1998): two or three engines get their whole stock, and however many hold some, there is
        always room for the next one and for readers.
        """
        state = self._state
        books = state.books[group.segment]
        limits = state.limits
        free = int(books.capacity * limits.held_fraction_max) - books.reserved - books.quarantined
        # An operator who lets one engine hold all that may be held wants no fairness among them.
        alone = books.reserved == group.stock_bytes
        if alone or limits.stock_fraction_max >= limits.held_fraction_max:
            return books.capacity
        return (free - group.stock_bytes - group.quarantined_bytes) // 2

    def _quota_share(self, namespace: Namespace, block_bytes: int) -> int:
        """Bytes of the quota that may still be reserved: half of it, but at least one block.

        Otherwise a stock of empty slots as large as the quota would evict all blocks of the
        namespace.
        """
        quota = namespace.quota_bytes
        if quota is None:
            return self._state.books[self._state.segment_of[namespace.tenant]].capacity
        groups = self._state.groups.of_namespace(namespace.number)
        taken = sum(group.stock_bytes + group.quarantined_bytes for group in groups)
        return max(quota // 2, min(block_bytes, quota)) - taken

    def _quota_room(self, namespace: Namespace, want_bytes: int, evicted_max: int | None) -> int:
        """Bytes that the namespace may still take, after evicting its own coldest blocks."""
        quota = namespace.quota_bytes
        if quota is None:
            return want_bytes
        self._evictor.shrink(namespace, max(0, quota - want_bytes), Cause.QUOTA, evicted_max)
        return quota - namespace.used_bytes

    def commit(self, session: int, epoch: int, items: list[CommitItem]) -> list[Bools]:
        """Bind keys to written slots.

        All items are checked before any is applied. Returns for each item a boolean for each key:
        True if it was bound now, False if it was bound before.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``, ``bad_group``, ``bad_keys``,
                ``bad_extents``, ``bad_checksums``, ``not_reserved``, ``already_committed``,
                ``foreign_extent``, ``stale_extent``, ``too_many_keys``.
        """
        commit = self.begin_commit(session, epoch, items)
        while commit.unfinished:
            commit.bind_some(self._state.limits.keys_max)
        return commit.stored

    def begin_commit(self, session: int, epoch: int, items: list[CommitItem]) -> Commit:
        """Check a commit; nothing is bound yet.

        Raises:
            KVHearthError: as ``commit``.
        """
        state = self._state
        group, namespace = state.current(session, epoch)
        state.check_count(sum(len(item.keys) for item in items))
        for item in items:
            self._check_item(group, namespace, item)
        every = [item.slots.reshape(-1) for item in items]
        if every:
            ordered = np.sort(np.concatenate(every))
            require(
                not (ordered[1:] == ordered[:-1]).any(),
                Reason.BAD_EXTENTS,
                "one slot is named twice in the same commit",
            )
        return Commit(self, session, epoch, items)

    def bind(self, session: int, epoch: int, item: CommitItem) -> Bools:
        """Bind a part of a checked commit, if its group and epoch live and it holds its slots."""
        group, namespace = self._state.current(session, epoch)
        held = SlotsItem(item.slots.reshape(-1), item.generations.reshape(-1))
        self.check_held(group, held, (State.RESERVED,))
        return self._binder.bind(group, namespace, item)

    def commit_few(
        self, group: Group, namespace: Namespace, epoch: int, ones: list[SingleCommit]
    ) -> list[bool] | None:
        """Fast path of ``commit`` for a few blocks, each of another chain.

        Returns for each block whether it was bound now; None, with nothing changed, if ``commit``
        must decide.
        """
        return self._few.commit(group, namespace, ones) if epoch == namespace.epoch else None

    def _check_item(self, group: Group, namespace: Namespace, item: CommitItem) -> None:
        state = self._state
        spec = group_spec(namespace.contract, item.kv_group)
        shape = (len(item.keys), spec.shards)
        require(
            item.slots.shape == shape and item.generations.shape == shape,
            Reason.BAD_EXTENTS,
            lambda: f"slots of shape {item.slots.shape} for {shape[0]} keys of {shape[1]} shards",
        )
        require(
            item.checksums is None or item.checksums.shape == (*shape, CHECKSUM_BYTES),
            Reason.BAD_CHECKSUMS,
            lambda: f"checksums must be {shape[0]} x {shape[1]} x {CHECKSUM_BYTES} bytes or none",
        )
        require(
            len(item.parent) in (0, namespace.contract.hash_bytes),
            Reason.BAD_KEYS,
            f"parent key must have {namespace.contract.hash_bytes} bytes",
        )
        slots = item.slots.reshape(-1)
        self.check_held(group, SlotsItem(slots, item.generations.reshape(-1)), (State.RESERVED,))
        require(
            (state.table.slot_bytes_of(slots) == state.slot_bytes(spec)).all(),
            Reason.BAD_EXTENTS,
            f"a slot was reserved for another group than {item.kv_group}",
        )

    def check_held(self, group: Group, item: SlotsItem, states: tuple[State, ...]) -> None:
        """Refuse slots that the group does not hold in one of ``states`` at these generations."""
        table, slots = self._state.table, item.slots
        if len(slots) and slots.min() >= 0 and slots.max() < len(table.state):
            good = table.state[slots] == int(states[0])
            good &= table.owner[slots] == group.number
            good &= table.generation[slots] == item.generations
            if good.all():
                return  # nearly always; the code below finds the error
        require(
            table.in_use(slots).all(), Reason.BAD_EXTENTS, "a slot number is outside of the arena"
        )
        found = table.state[slots]
        same = table.generation[slots] == item.generations
        done = (found == State.COMMITTED) | (found == State.SUMMED)
        require(
            not (done & same).any(),
            Reason.ALREADY_COMMITTED,
            "a slot of this call was committed before",
        )
        held = found == int(states[0])
        for state in states[1:]:
            held |= found == int(state)
        mine = table.owner[slots] == group.number
        require(
            not (held & ~mine).any(),
            Reason.FOREIGN_EXTENT,
            "a slot of this call was reserved by another group",
        )
        # Quarantining a slot raised its generation by one. An older generation comes from a message
        # that arrives twice: the slot was in use since, and may be written to now.
        quarantined = table.generation[slots] == item.generations + np.uint32(1)
        same |= (found == State.QUARANTINED) & quarantined
        if not (held & mine & same).all():
            stale = bool((held & mine & ~same).any())
            reason = Reason.STALE_EXTENT if stale else Reason.NOT_RESERVED
            raise KVHearthError(
                reason, "a slot of this call is not reserved by this group any more"
            )

    def summed(self, slots: I64, generations: U32, sums: U8) -> int:
        """Store checksums that the daemon computed for committed blocks.

        ``slots`` and ``generations`` have shape (n, shards), ``sums`` (n, shards, 16). Blocks that
        were removed meanwhile are passed over. Returns the number of blocks that became servable.
        """
        state, table = self._state, self._state.table
        live = (table.generation[slots] == generations).all(axis=1)
        live &= (table.state[slots] == State.COMMITTED).all(axis=1)
        if not live.any():
            return 0
        kept = slots[live]
        every = kept.reshape(-1)
        table.checksum[every] = (
            np.ascontiguousarray(sums[live]).view(f"V{CHECKSUM_BYTES}").reshape(-1)
        )
        table.state[every] = State.SUMMED
        table.flags[every] = 0  # this sum is of the present bytes: nothing is left to verify
        state.actions.append(Summed(every))
        state.count("summed_blocks", len(kept))
        heads = kept[:, 0]
        state.writeback_queue.offer(heads)
        for number, kv_group, mine in table.by_kind(heads):
            if number in state.events:
                keys = state.index.keys(mine)
                state.events.append(EventKind.STORED, number, kv_group, keys, tier=Tier.DRAM)
        return len(kept)

    def give_back(self, session: int, grants: list[SlotGrant]) -> None:
        """Free the slots that a session's group still holds; the drain of an ended one does so."""
        state = self._state
        with contextlib.suppress(KVHearthError):
            group = state.group_of(session)
            slots = [grant.still_held(state.table, group.number) for grant in grants]
            every = np.concatenate(slots)
            held = SlotsItem(every, state.table.generation[every])
            self.abort(session, [held], [], in_doubt=False)

    def abort(
        self, session: int, items: list[SlotsItem], reservation_ids: list[int], *, in_doubt: bool
    ) -> tuple[int, int]:
        """Free reserved slots, or quarantine them if a worker may still be writing to them.

        Returns (freed, quarantined). Slots that an abort in doubt quarantined are freed by the next
        abort that is not in doubt, whether it names slots or the reservation. While the group has a
        member that left without a word, every abort quarantines; one that is not in doubt frees as
        soon as that member is drained.

        Raises:
            KVHearthError: ``group_gone``, ``bad_extents``, ``not_reserved``, ``foreign_extent``,
                ``stale_extent``, ``already_committed``.
        """
        state = self._state
        group = state.group_of(session)
        for item in items:
            self.check_held(group, item, (State.RESERVED, State.QUARANTINED))
        parts = [item.slots for item in items]
        for reservation_id in reservation_ids:
            known = group.reservations.pop(reservation_id, None)
            if known is None or not known.handed:
                group.note_early_release(reservation_id)
                continue
            parts.append(known.still_held(state.table, group.number))
            if in_doubt:
                known.left, known.in_doubt = [], True
                group.remember(reservation_id, known)
        slots = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        reserved_slots = slots[state.table.state[slots] == State.RESERVED]
        if group.has_undrained_member and not in_doubt:
            # The scheduler cannot know what a dead rank is still writing. The drain of the group's
            # last such member frees the slots.
            group.doubt(slots)
            in_doubt = True
        if in_doubt:
            quarantine(state, group, reserved_slots)
            return 0, len(reserved_slots)
        take_from_quarantine(state, group, slots[state.table.state[slots] == State.QUARANTINED])
        if len(reserved_slots):
            state.table.bump(reserved_slots)
            size = state.book(group.segment, "reserved", reserved_slots, -1)
            group.stock_bytes -= size
            state.namespaces.get(group.namespace).used_bytes -= size
            state.free_slots(group.segment, reserved_slots)
        return len(slots), 0


class Commit:
    """A checked commit, bound in portions.

    If its epoch, its group or its slots end between two portions, the slots of the rest are given
    back and what is bound stays bound.

    Args:
        writing: binds the portions.
        session: a scheduler's session.
        epoch: weights epoch that computed the blocks.
        items: what to bind; see ``Writing.begin_commit``.
    """

    def __init__(self, writing: Writing, session: int, epoch: int, items: list[CommitItem]) -> None:
        self.items = items
        self._writing = writing
        self._session = session
        self._epoch = epoch
        self._stored = [np.zeros(len(item.keys), np.bool_) for item in items]
        self._at = 0
        self._bound = 0
        self._skip_empty()

    @property
    def unfinished(self) -> bool:
        """Whether keys are left to bind."""
        return self._at < len(self.items)

    @property
    def stored(self) -> list[Bools]:
        """For each item a boolean for each key: True if it was bound by this commit."""
        return self._stored

    def bind_some(self, keys_max: int) -> None:
        """Bind up to ``keys_max`` more keys.

        Raises:
            KVHearthError: ``group_gone``, ``stale_epoch``, or a reason of slots that are no longer
                held; the commit has then ended.
        """
        while keys_max > 0 and self.unfinished:
            item, begin = self.items[self._at], self._bound
            end = min(begin + keys_max, len(item.keys))
            part = item if end - begin == len(item.keys) else item.part(begin, end)
            try:
                self._stored[self._at][begin:end] = self._writing.bind(
                    self._session, self._epoch, part
                )
            except KVHearthError:
                self._give_back()
                raise
            keys_max -= end - begin
            self._bound = end
            self._skip_empty()

    def _skip_empty(self) -> None:
        while self.unfinished and self._bound == len(self.items[self._at].keys):
            self._at, self._bound = self._at + 1, 0

    def _give_back(self) -> None:
        """Free the slots that are not bound; the client cannot tell them from the bound ones."""
        left = []
        while self.unfinished:
            item = self.items[self._at]
            rest = item.part(self._bound, len(item.keys))
            left.append(SlotGrant(item.kv_group, rest.slots, rest.generations))
            self._at, self._bound = self._at + 1, 0
        self._writing.give_back(self._session, left)


_ABORTED = "this reservation was aborted"
_SHORT_TEXT = {
    Reason.STOCK_CAP: (
        "the group holds as many reserved slots as it may, beside the tenant's other engines; "
        "commit or abort some"
    ),
    Reason.HELD_CAP: "leases, stocks and quarantine are at their cap; release some",
    Reason.QUOTA_EXCEEDED: (
        "half of the namespace's quota is reserved, or it is at its quota and holds nothing "
        "evictable; commit, abort or release some"
    ),
    Reason.NO_SPACE: "nothing evictable is left for this slot size",
}
