"""Engine groups: their members, leases, reservations and aborts in doubt."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass, field

import numpy as np

from kvhearth.errors import Reason
from kvhearth.model import I64, U32
from kvhearth_server.core.slot_table import SlotTable, State

PORTION_SLOTS_MIN = 4096
"""Slots of a lease's portion up to which it takes more."""


class Leases(MutableMapping[int, I64]):
    """Lease id to slots, in the order in which the leases were granted.

    Slots are exchanged as I64, as everywhere in the core, but stored in 4 bytes each: a lease names
    every slot that it keeps, and many leases may keep the same ones.
    """

    def __init__(self) -> None:
        self._slots: dict[int, U32] = {}
        self._joined: dict[int, list[U32]] = {}
        """Slots that joined a lease later, portion by portion."""

    def __getitem__(self, lease_id: int) -> I64:
        first, *others = self.portions(lease_id)
        return np.concatenate([first, *others]) if others else first

    def portions(self, lease_id: int) -> list[I64]:
        """Return a lease's slots by portion, ascending in each; no slot is in two of them."""
        portions = [self._slots[lease_id], *self._joined.get(lease_id, ())]
        return [each.astype(np.int64) for each in portions]

    def __setitem__(self, lease_id: int, slots: I64) -> None:
        self._slots[lease_id] = slots.astype(np.uint32)

    def fresh(self, lease_id: int, slots: I64) -> I64:
        """Return those of the ascending ``slots`` that a lease does not have yet."""
        for held in self.portions(lease_id):
            if len(slots) and held[0] <= slots[-1] and slots[0] <= held[-1]:
                at = np.minimum(np.searchsorted(held, slots), len(held) - 1)
                slots = slots[held[at] != slots]
        return slots

    def join(self, lease_id: int, slots: I64) -> None:
        """Add slots to a lease that ``fresh`` has returned. Short portions grow, since an array of
        its own for each would have no bound but the slots.
        """
        joined = self._joined.setdefault(lease_id, [])
        if joined and len(joined[-1]) < PORTION_SLOTS_MIN:
            slots = np.sort(np.concatenate((slots, joined.pop())))
        if len(slots):
            joined.append(slots.astype(np.uint32))

    def __delitem__(self, lease_id: int) -> None:
        del self._slots[lease_id]
        self._joined.pop(lease_id, None)

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def all_slots(self) -> U32:
        """The slots of all leases, concatenated; shape (slots held,)."""
        joined = [slots for portions in self._joined.values() for slots in portions]
        return np.concatenate([np.zeros(0, np.uint32), *self._slots.values(), *joined])

    @property
    def slot_count(self) -> int:
        """Number of slots held, each counted once for every lease on it."""
        return self.nbytes // 4

    @property
    def nbytes(self) -> int:
        """Bytes of the slot lists."""
        firsts = (slots.nbytes for slots in self._slots.values())
        joined = (slots.nbytes for portions in self._joined.values() for slots in portions)
        return sum(firsts) + sum(joined)


RESERVATIONS_REMEMBERED, DOUBTS_REMEMBERED = 64, 1024
_DOUBTFUL_PARTS_MAX = 64
TOMBSTONES_REMEMBERED = 1024


class MemberState(enum.StrEnum):
    """State of a member. ``GONE``: left without a word, may write. ``DRAINED``: cannot write."""

    ATTACHED = "attached"
    GONE = "gone"
    DRAINED = "drained"


# Each access to an enumeration member by name costs a search.
_ATTACHED = MemberState.ATTACHED


@dataclass
class Member:
    """One attached process; ``rank`` is -1 for one that moves no bytes, ``node`` the NUMA node that
    it copies from, -1 if that is not known.
    """

    session: int
    rank: int
    scheduler: bool
    mapped: bool
    state: MemberState = MemberState.ATTACHED
    node: int = -1


@dataclass(frozen=True)
class SlotGrant:
    """Slots of one KV group as handed out, shape (n, shards), with their generations then."""

    kv_group: int
    slots: I64
    generations: U32

    def joined(self, other: SlotGrant) -> SlotGrant:
        """Concatenate these slots and others of the same KV group."""
        return SlotGrant(
            self.kv_group,
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.generations, other.generations]),
        )

    def still_held(self, table: SlotTable, owner: int) -> I64:
        """Slots still reserved, or quarantined and not freed since; flat."""
        slots, generations = self.slots.reshape(-1), self.generations.reshape(-1)
        state, now = table.state[slots], table.generation[slots]
        reserved = (state == State.RESERVED) & (now == generations)
        # Quarantining a slot raised its generation by one; any later change raises it further.
        quarantined = (state == State.QUARANTINED) & (now == generations + np.uint32(1))
        held: I64 = slots[(table.owner[slots] == owner) & (reserved | quarantined)]
        return held


@dataclass
class Reservation:
    """A reservation until it is aborted for good.

    ``left`` are the pairs of (KV group, blocks) still to be granted; ``short`` is the bound that
    made an earlier pair smaller. After an abort in doubt (``in_doubt``) it is kept for a later
    one that is not in doubt, which frees the slots that are quarantined until then.
    """

    left: list[tuple[int, int]]
    short: Reason | None = None
    handed: list[SlotGrant] = field(default_factory=list)
    in_doubt: bool = False

    def still_held(self, table: SlotTable, owner: int) -> I64:
        """Slots that are reserved or quarantined since; flat."""
        parts = [part.still_held(table, owner) for part in self.handed]
        return np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass
class Group:
    """One engine's incarnation.

    ``stock_bytes`` are the bytes of its RESERVED slots; ``quarantined_bytes`` those of its
    QUARANTINED slots, which a member may still write to. ``handed`` holds arrays of slots that may
    be in either state; see ``held_slots``. ``doubtful`` are slots that become free once no member
    is ``GONE``. ``leased_at`` is the grant time of each of ``leases``. ``asked_tokens`` are
    those that its lookups named, ``hit_tokens`` those that they could restore. ``process_group`` is
    the name that all its members gave.
    """

    number: int
    tenant: str
    segment: int
    engine_id: str
    incarnation: int
    namespace: int
    world_size: int
    process_group: str = ""
    members: dict[int, Member] = field(default_factory=dict)
    ended: bool = False
    stock_bytes: int = 0
    quarantined_bytes: int = 0
    handed: list[I64] = field(default_factory=list)
    handed_count: int = 0
    doubtful: list[I64] = field(default_factory=list)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    leased_at: dict[int, float] = field(default_factory=dict)
    released_early: OrderedDict[int, None] = field(default_factory=OrderedDict)
    asked_tokens: int = 0
    hit_tokens: int = 0

    @property
    def attached(self) -> list[Member]:
        """Members whose attach socket is open."""
        return [m for m in self.members.values() if m.state is MemberState.ATTACHED]

    @property
    def complete(self) -> bool:
        """Whether a scheduler and all ranks are attached."""
        here = self.attached
        ranks = {m.rank for m in here if m.rank >= 0}
        return any(m.scheduler for m in here) and len(ranks) == self.world_size

    @property
    def has_undrained_member(self) -> bool:
        """Whether a member left without a word and may still be writing."""
        return any(m.state is MemberState.GONE for m in self.members.values())

    @property
    def drained(self) -> bool:
        """Whether no member may still be writing."""
        return all(m.state is MemberState.DRAINED for m in self.members.values())

    def nodes(self, shards: int) -> list[int]:
        """NUMA node of the rank that copies each shard of a block; -1 where it is not known.

        Blocks of fewer shards than ranks are copied by any of them: the first one counts.
        """
        by_rank = {member.rank: member.node for member in self.attached}
        return [by_rank.get(rank, -1) for rank in range(shards)]

    def grant(self, reservation: Reservation, handed: list[SlotGrant]) -> None:
        """Record grants of a reservation, for a client that asks again or never saw the answer."""
        known = reservation.handed
        for part in handed:
            flat = part.slots.reshape(-1)
            self.handed.append(flat)
            self.handed_count += len(flat)
            if known and known[-1].kv_group == part.kv_group:
                known[-1] = known[-1].joined(part)
            else:
                known.append(part)

    def remember(self, reservation_id: int, reservation: Reservation) -> None:
        """Make a reservation the youngest one; beyond the limits, forget the oldest.

        What is still to be granted is not forgotten. The quarantined slots of a forgotten one come
        back when the group ends.
        """
        self.reservations.pop(reservation_id, None)
        self.reservations[reservation_id] = reservation
        if len(self.reservations) <= RESERVATIONS_REMEMBERED:
            return
        whole = [(number, each) for number, each in self.reservations.items() if not each.left]
        doubted = [number for number, each in whole if each.in_doubt]
        granted = [number for number, each in whole if not each.in_doubt]
        for number in (*doubted[:-DOUBTS_REMEMBERED], *granted[:-RESERVATIONS_REMEMBERED]):
            del self.reservations[number]

    def doubt(self, slots: I64) -> None:
        """Record slots that become free once no member is ``GONE``."""
        self.doubtful.append(slots)
        if len(self.doubtful) > _DOUBTFUL_PARTS_MAX:
            # The same message may arrive repeatedly.
            self.doubtful = [np.unique(np.concatenate(self.doubtful))]

    def held_slots(self, table: SlotTable) -> I64:
        """Slots that this group holds now, reserved or quarantined; forgets others on record."""
        if not self.handed:
            return np.zeros(0, np.int64)
        slots = np.concatenate(self.handed)
        state = table.state[slots]
        mine = (table.owner[slots] == self.number) & (
            (state == State.RESERVED) | (state == State.QUARANTINED)
        )
        kept: I64 = np.unique(slots[mine])  # last: it takes ten times as long as the look-up
        self.handed = [kept]
        self.handed_count = len(kept)
        for number, each in list(self.reservations.items()):
            if each.in_doubt and not len(each.still_held(table, self.number)):
                del self.reservations[number]
        return kept

    def tidy(self, table: SlotTable) -> None:
        """Bound the lists of handed slots, at a cost spread over reservations."""
        if self.handed_count > 4096 + 8 * (self.handed[0].size if self.handed else 0):
            self.held_slots(table)

    def note_early_release(self, lease_id: int) -> None:
        """Remember a release that came before its lookup, so that the lookup grants nothing."""
        self.released_early[lease_id] = None
        while len(self.released_early) > TOMBSTONES_REMEMBERED:
            self.released_early.popitem(last=False)


class Groups:
    """All groups that live or still hold something, by number, session and namespace."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._by_session: dict[int, Group] = {}
        self._by_namespace: dict[int, dict[int, Group]] = {}
        self._incarnations: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._next = 1

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def of_namespace(self, number: int) -> Collection[Group]:
        """The groups of a namespace that live or still hold something."""
        return self._by_namespace.get(number, {}).values()

    @property
    def sessions(self) -> int:
        """Number of sessions whose attach socket is open."""
        return sum(len(group.attached) for group in self._groups.values())

    def of_session(self, session: int) -> Group | None:
        """The group of a session that is not drained yet."""
        return self._by_session.get(session)

    def attached_of(self, session: int) -> Group | None:
        """The group of a session whose attach socket is open, unless the group has ended."""
        group = self._by_session.get(session)
        if group is None or group.ended:
            return None
        member = group.members.get(session)
        return group if member is not None and member.state is _ATTACHED else None

    def open_group(self, tenant: str, engine_id: str) -> Group | None:
        """The engine's group that has not ended."""
        for group in self._groups.values():
            if (group.tenant, group.engine_id) == (tenant, engine_id) and not group.ended:
                return group
        return None

    def create(
        self,
        tenant: str,
        segment: int,
        engine_id: str,
        namespace: int,
        world_size: int,
        process_group: str,
    ) -> Group:
        """Create a new incarnation of an engine."""
        name = (tenant, engine_id)
        incarnation = self._incarnations.pop(name, 0) + 1
        self._incarnations[name] = incarnation
        while len(self._incarnations) > 65536:
            self._incarnations.popitem(last=False)
        number = self._next
        self._next += 1
        group = Group(
            number, tenant, segment, engine_id, incarnation, namespace, world_size, process_group
        )
        self._add(group)
        return group

    def _add(self, group: Group) -> None:
        self._groups[group.number] = group
        self._by_namespace.setdefault(group.namespace, {})[group.number] = group

    def restore(self, group: Group) -> None:
        """Restore a group of a daemon that died, with members that are gone but not drained."""
        self._add(group)
        self._next = max(self._next, group.number + 1)
        name = (group.tenant, group.engine_id)
        self._incarnations[name] = max(self._incarnations.get(name, 0), group.incarnation)
        for session in group.members:
            self._by_session[session] = group

    def join(self, group: Group, member: Member) -> None:
        """Add a member."""
        group.members[member.session] = member
        self._by_session[member.session] = group

    def forget_drained(self, group: Group) -> None:
        """Forget drained members."""
        for member in list(group.members.values()):
            if member.state is MemberState.DRAINED:
                del group.members[member.session]
                del self._by_session[member.session]

    def drop(self, group: Group) -> None:
        """Forget a group that holds nothing any more."""
        del self._groups[group.number]
        alike = self._by_namespace[group.namespace]
        del alike[group.number]
        if not alike:
            del self._by_namespace[group.namespace]
        for session in group.members:
            self._by_session.pop(session, None)
