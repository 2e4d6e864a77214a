"""State machine of a core, a lower tier with any permitted behaviour, and engines that use both.

Invariants after every step: the books balance, every servable byte is right, no slot of the tier is
in use elsewhere, and no block is lost that had to be written back first.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, U32
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.tiers.base import Failed, Outcome, Throttled
from support.core_kit import contract, full, key, mamba, window
from support.fake_tier import SCRIBBLE
from support.tier_rig import TierRig

KEYS = 30
CONTRACTS = [
    contract(full()),
    contract(full(4000, shards=3), window(32, 9000)),
    contract(full(8192), mamba(20000)),
]
SHORT = {Reason.NO_SPACE, Reason.HELD_CAP, Reason.STOCK_CAP, Reason.QUOTA_EXCEEDED}
OUTCOMES: list[Outcome] = [
    Throttled("full", 0.02),
    Throttled("queue"),
    Throttled("admission"),
    Throttled("budget", 5.0),
    Failed("io"),
    Failed("no_space"),
]
REFUSALS = [None, None, Throttled("full", 0.02), Throttled("queue"), Throttled("degraded", 5.0)]

some_keys = st.one_of(
    st.integers(1, KEYS).map(lambda n: [key(i) for i in range(n)]),
    st.lists(st.integers(0, KEYS - 1).map(key), min_size=1, max_size=8),
)
new_keys = st.lists(st.integers(0, KEYS - 1).map(key), min_size=1, max_size=12)
mostly = st.sampled_from([True, True, True, False])
seldom = precondition(lambda self: self.steps % 6 == 5)
seats = st.integers(0, 2)

OPTIONS = st.fixed_dictionaries(
    {
        "slabs": st.integers(1, 3),
        "tenants": st.sampled_from([("t",), ("t", "u")]),
        "capacity_bytes": st.sampled_from([40_000, 200_000, 1 << 30]),
        "queue_reads": st.sampled_from([3, 16, 1024]),
        "queue_writes": st.sampled_from([3, 16, 1024]),
        "namespace_quota_bytes": st.sampled_from([None, None, 60_000]),
    }
)

Name = tuple[int, int, bytes]


class TierMachine(RuleBasedStateMachine):
    """All rules."""

    rig: TierRig

    def __init__(self) -> None:
        super().__init__()
        self.seats: dict[int, int] = {}
        self.leases: dict[int, set[int]] = {}
        self.asked: dict[int, set[int]] = {}
        self.held: list[tuple[int, int, I64, U32]] = []
        self.numbers = itertools.count(1)
        self.before: dict[Name, tuple[int, int]] = {}
        self.refusals = self.steps = 0
        self.may_lose = False
        """This step removes blocks on purpose."""

    @initialize(options=OPTIONS)
    def begin(self, options: dict[str, Any]) -> None:
        tenants = options["tenants"]
        self.rig = TierRig(
            **options,
            held_fraction_max=0.7,
            stock_fraction_max=0.5,
            leases_max=4,
        )
        self.tenants = tenants
        for seat in range(2):
            self._attach(seat)
            for start, group in itertools.product(range(0, KEYS, 6), range(2)):
                self.store(seat, [key(start + i) for i in range(6)], group, summed=True)
                self.rig.settle()
        self.may_lose = False
        self.before = self._blocks()

    def _attach(self, seat: int) -> None:
        tenant = self.tenants[seat % len(self.tenants)]
        made = CONTRACTS[seat % len(CONTRACTS)]
        self.seats[seat] = self.rig.attach(made, tenant=tenant, engine_id=f"e{seat}")
        self.leases[seat], self.asked[seat] = set(), set()

    # -- engines -----------------------------------------------------------------------------------

    @rule(seat=seats, named=new_keys, group=st.integers(0, 1), summed=st.booleans())
    def store(self, seat: int, named: list[bytes], group: int, summed: bool) -> None:
        """Store as many blocks as there is room for."""
        taken = self._reserve(seat, len(named), group)
        if taken is not None:
            kv_group, slots, generations = taken
            item = self.rig.item(
                named[: len(slots)], slots, generations, kv_group=kv_group, summed=summed
            )
            self.may_lose = True  # it may remove blocks of an older epoch under these keys
            self.rig.commit(self.seats[seat], item)

    def _reserve(self, seat: int, count: int, group: int) -> tuple[int, I64, U32] | None:
        if seat not in self.seats:
            return None
        session = self.seats[seat]
        groups = CONTRACTS[seat % len(CONTRACTS)].groups
        kv_group = group % len(groups)
        try:
            reserved = self.rig.reserve(session, count, kv_group)
        except KVHearthError as error:
            if error.reason not in SHORT:
                raise
            return None
        (part,) = reserved.handed
        for slot in part.slots.reshape(-1).tolist():
            self.rig.view(slot, groups[kv_group].page_bytes)[:] = SCRIBBLE + 1
        return kv_group, part.slots, part.generations

    @rule(seat=seats, count=st.integers(1, 6), group=st.integers(0, 1))
    def reserve(self, seat: int, count: int, group: int) -> None:
        """Hold slots that a client may be writing to."""
        taken = self._reserve(seat, count, group)
        if taken is not None:
            self.held.append((seat, *taken))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seat, _, slots, generations = self.held.pop(
            data.draw(st.integers(0, len(self.held) - 1), label="held")
        )
        self.rig.abort(self.seats[seat], slots, generations)

    @precondition(lambda self: self.rig.to_sum)
    @rule()
    def sum(self) -> None:
        """Let the daemon checksum those blocks of an action that still live."""
        rig = self.rig
        action = rig.to_sum.pop(0)
        table = rig.state.table
        live = (table.generation[action.slots] == action.generations).all(axis=1)
        slots = action.slots[live]
        if len(slots):
            space = rig.state.namespaces.get(int(table.namespace[slots[0, 0]]))
            length = space.contract.groups[int(table.group[slots[0, 0]])].page_bytes
            sums = rig.sums(slots, length)
            rig.call(rig.core.writing.summed, slots, action.generations[live], sums)

    @rule(seat=seats, named=some_keys, lease=st.booleans(), promotion=mostly)
    def lookup(self, seat: int, named: list[bytes], lease: bool, promotion: bool) -> None:
        if seat not in self.seats:
            return
        session, rig = self.seats[seat], self.rig
        lease_id = next(self.numbers) if lease and len(self.leases[seat]) < 4 else 0
        groups = range(len(CONTRACTS[seat % len(CONTRACTS)].groups))
        found = rig.lookup_all(session, dict.fromkeys(groups, named), lease_id=lease_id)
        for one in found.groups:
            assert not (one.ready & ~one.present).any()
        if found.lease_id:
            self.leases[seat].add(lease_id)
        if promotion:
            number = rig.group(session).number
            rig.tiering.promote(found.promotion_queue, number, lease_id)
            self.asked[seat].add(lease_id)
        assert (rig.tiering.eta_us(found.promotion_queue) > 0) == bool(found.promotion_queue)

    @rule(seat=seats, data=st.data())
    def release(self, seat: int, data: st.DataObject) -> None:
        if self.leases.get(seat):
            lease_id = data.draw(st.sampled_from(sorted(self.leases[seat])), label="lease")
            self.leases[seat].discard(lease_id)
            self.rig.call(self.rig.core.reading.release, self.seats[seat], [lease_id])

    @rule(seat=seats, data=st.data())
    def cancel(self, seat: int, data: st.DataObject) -> None:
        if self.asked.get(seat):
            lease_id = data.draw(st.sampled_from(sorted(self.asked[seat])), label="asked")
            number = self.rig.group(self.seats[seat]).number
            self.rig.tiering.promoter.cancel(number, [lease_id])

    @seldom
    @rule(seat=seats, back=st.booleans())
    def leave(self, seat: int, back: bool) -> None:
        """End an engine, or begin one."""
        session = self.seats.pop(seat, None)
        if session is not None:
            number = self.rig.group(session).number
            self.held = [each for each in self.held if each[0] != seat]
            del self.leases[seat], self.asked[seat]
            self.rig.leave(session)
            self.rig.tiering.promoter.group_ended(number)
        if session is None or back:
            self._attach(seat)

    @seldom
    @rule(seat=seats)
    def bump(self, seat: int) -> None:
        """Bump the weights epoch."""
        if seat in self.seats:
            session = self.seats[seat]
            self.rig.core.bump_epoch(session, self.rig.epoch(session))

    @seldom
    @rule(seat=seats, keep=st.sampled_from([0, 20_000]))
    def evict(self, seat: int, keep: int) -> None:
        """Evict on an operator's request."""
        if seat in self.seats:
            space = self.rig.state.namespaces.get(self.rig.group(self.seats[seat]).namespace)
            self.may_lose = True
            self.rig.call(self.rig.core.evict, space.digest, keep)

    # -- the tier ----------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.1, 3.0]), count=st.integers(1, 3))
    def turn(self, seconds: float, count: int) -> None:
        self.rig.now += seconds
        self.rig.turn(count)

    @rule()
    def come_to_rest(self) -> None:
        """Let time pass while the tier works properly."""
        tier = self.rig.tier
        if not (tier.held or tier.refuse_stores or tier.refuse_loads):
            self.rig.now += 10
            self.rig.turn(3)

    @seldom
    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.rig.tier.held = held

    @rule(count=st.integers(1, 3), newest=st.booleans())
    def lose_blocks(self, count: int, newest: bool) -> None:
        """End some batches, in any order."""
        if newest:
            self.rig.tier.under_way.reverse()
        self.rig.tier.lose_blocks(count)
        self.rig.turn()

    @seldom
    @rule(stores=st.sampled_from(REFUSALS), loads=st.sampled_from(REFUSALS))
    def refuse(self, stores: Throttled | None, loads: Throttled | None) -> None:
        self.rig.tier.refuse_stores, self.rig.tier.refuse_loads = stores, loads

    @seldom
    @rule(outcome=st.none() | st.sampled_from(OUTCOMES), odd=st.booleans(), loses=st.booleans())
    def spoil(self, outcome: Outcome | None, odd: bool, loses: bool) -> None:
        """Let half of the blocks get a bad outcome from now on; blocks that fail to load may be
        lost, too.
        """
        tier = self.rig.tier

        def chosen(load: bool, named: bytes) -> Outcome | None:
            if outcome is None or named[-1] % 2 != odd:
                return None
            if load and isinstance(outcome, Throttled):
                return None
            if load and loses:
                tier.lose([named])
            return outcome

        tier.spoil = chosen

    @seldom
    @rule(named=new_keys)
    def make_room(self, named: list[bytes]) -> None:
        """Let the tier evict blocks."""
        self.rig.tier.evict(named)
        self.rig.turn()

    @seldom
    @rule()
    def stuck(self) -> None:
        self.rig.tier.stuck()
        self.rig.turn()

    @seldom
    @rule(named=st.integers(0, KEYS - 1).map(key))
    def damage_lower_tier(self, named: bytes) -> None:
        """Flip a bit of the tier's copies."""
        self.rig.tier.damage(named)

    @precondition(lambda self: self.steps % 6 == 5 and len(self.rig.state.index))
    @rule(data=st.data())
    def damage_here(self, data: st.DataObject) -> None:
        """Damage a block in memory. The finder removes it, and a good copy may be promoted."""
        rig = self.rig
        table = rig.state.table
        heads = [h for _, _, found in rig.state.index.items() for h in found.values()]
        heads = sorted(h for h in heads if table.state[h] == State.SUMMED)
        if not heads:
            return
        head = heads[data.draw(st.integers(0, len(heads) - 1), label="block")]
        bring_back = rig.tiering.repair(np.array([head]))
        self.may_lose = True
        remove = rig.core.reading.remove_bad
        assert rig.call(remove, np.array([head]), table.generation[[head]])
        bring_back()

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        rig = getattr(self, "rig", None)
        if rig is None:
            return
        self.steps += 1
        rig.call(lambda: None)
        rig.check()
        now = self._blocks()
        refusals = sum(
            rig.counted[name]
            for name in rig.counted
            if name[0] in ("demotion_refused", "demotion_failed", "checksum_failures")
        )
        if not self.may_lose and refusals == self.refusals:
            for name, (copy_state, epoch) in self.before.items():
                if name not in now:
                    self._was_saved(name, copy_state, epoch)
        self.before, self.refusals, self.may_lose = now, refusals, False

    def _blocks(self) -> dict[Name, tuple[int, int]]:
        table = self.rig.state.table
        return {
            (number, kv_group, named): (int(table.copy_state[head]), int(table.epoch[head]))
            for number, kv_group, heads in self.rig.state.index.items()
            for named, head in heads.items()
        }

    def _was_saved(self, name: Name, copy_state: int, epoch: int) -> None:
        number, kv_group, named = name
        space = self.rig.state.namespaces.get(number)
        if epoch != space.epoch or copy_state == CopyState.REFUSED:
            return
        there = self.rig.tiering.present(space, kv_group, [named])[0]
        assert there, f"{name} is gone from memory, and was {CopyState(copy_state)!r}"

    def teardown(self) -> None:
        """Check at the end that nothing remains held."""
        rig = getattr(self, "rig", None)
        if rig is None:
            return
        try:
            self._end_everything(rig)
        finally:
            rig.close()

    def _end_everything(self, rig: TierRig) -> None:
        tier: Any = rig.tier
        tier.held, tier.refuse_stores, tier.refuse_loads = False, None, None
        tier.spoil = lambda load, named: None
        for seat in list(self.seats):
            self.leave(seat, False)
        rig.now += 10
        rig.settle(2000)
        assert not len(rig.core.promotions)
        assert not rig.slots_in(State.LOADING)
        assert not rig.state.table.refs.any()
        for space in rig.state.namespaces:
            rig.call(rig.core.evict, space.digest, 0)
        assert not rig.state.table.state.any(), "a slot never came back"
        rig.check()
