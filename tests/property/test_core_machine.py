"""Random clients against the core, the engine and the journal, compared with a plain model.

The adversary is the worst that is allowed: after every step, whoever may write to a slot has
written garbage to it (attached ranks before their commit, ranks that vanished until they are
drained, engines that outlived the daemon). The daemon is killed between calls and inside of the
journal's operations. What is served must all the same be what was committed under that key, in that
namespace and epoch; checksums are not consulted for it.

A failure prints the steps and a blob that repeats them; the slow one prints its seed, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.core_kit import contract, full, key, mamba, refused, window
from support.core_model import (
    Block,
    Held,
    Memory,
    Model,
    Served,
    longest_hit,
    needed_blocks,
    places,
)
from support.core_refusals import Refusals
from support.core_shell import Crash, Shell, fault_hook

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import FLAG_SUMMED
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.holding import hold_room, newly_held_bytes
from kvhearth_server.core.reading import KeysItem
from kvhearth_server.core.removal import EVICTIONS
from kvhearth_server.core.state import Limits
from kvhearth_server.core.table import Geometry, State
from kvhearth_server.core.writing import CommitItem, Reserved, SlotsItem
from kvhearth_server.engine.sessions import Session
from kvhearth_server.memory.journal import STATE_WORDS

SLAB_BYTES = 64 * 1024
KEYS = 12
"""A small universe of keys, the same in all namespaces, so that they meet."""

CONTRACTS = [
    contract(full(block_tokens=2)),
    contract(full(4000, shards=2, block_tokens=2), window(5, 9000, block_tokens=2)),
    contract(
        full(block_tokens=4), mamba(20000, block_tokens=4), window(3, 4096, block_tokens=2)
    ),
    contract(full(block_tokens=2), revision="r2"),
]
ENGINES = [("t0", "e0"), ("t0", "e1"), ("t1", "e0")]
WORDS = np.array([STATE_WORDS[state] for state in sorted(State)], np.uint32)

key_numbers = st.integers(0, KEYS - 1)
some_keys = st.one_of(
    st.integers(1, KEYS).map(lambda n: [key(i) for i in range(n)]),
    st.lists(key_numbers.map(key), min_size=1, max_size=KEYS),
)


@dataclass(eq=False)
class Client:
    """One process: attached, or gone and perhaps still writing."""

    number: int
    record: Session
    engine: tuple[str, str]
    group: int
    contract: Contract
    rank: int
    scheduler: bool
    boot_id: str
    attached: bool = True


def survives(step: Callable[..., None]) -> Callable[..., None]:
    """A step during which the daemon may die."""

    @functools.wraps(step)
    def run(self: CoreMachine, **arguments: Any) -> None:
        try:
            step(self, **arguments)
        except Crash:
            self.come_back()
        self.pending = []

    return run


class CoreMachine(RuleBasedStateMachine):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        self.exits.enter_context(fault_hook(self.pass_point))
        self.fuse: int | None = None
        self.pending: list[Block] = []
        self.clients: list[Client] = []
        self.model = Model()
        self.serial = itertools.count(1)
        self.sums: list[tuple[Any, Any, Any]] = []
        self.withdrawn: set[tuple[int, int]] = set()
        self.shell: Shell | None = None

    @initialize(
        tenants=st.integers(1, 2),
        slabs=st.integers(2, 3),
        eviction=st.sampled_from(["s3fifo", "sieve"]),
        quota=st.sampled_from([None, None, 60_000]),
    )
    def begin(self, tenants: int, slabs: int, eviction: str, quota: int | None) -> None:
        names = [f"t{i}" for i in range(tenants)]
        self.geometry = Geometry.of([(n, slabs * SLAB_BYTES) for n in names], SLAB_BYTES, 4096)
        self.limits = Limits(
            held_fraction_max=0.8,
            stock_fraction_max=0.4,
            keys_max=24,
            sessions_max=6,
            namespaces_max=3,
            leases_max=3,
            pins_max=2,
            pin_ttl_max_s=100.0,
            namespace_quota_bytes=quota,
            eviction=eviction,
        )
        self.memory = Memory(self.geometry)
        self.shell = Shell(self.geometry, self.limits)
        self.tenants = names
        self.cursor = self.state.events.subscribe()

    # -- short names ------------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        return self.shell.engine

    @property
    def core(self) -> Any:
        return self.shell.engine.core

    @property
    def state(self) -> Any:
        return self.shell.engine.core.state

    def pass_point(self, _: str) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Crash

    def living(self, client: Client) -> bool:
        """The client's session is attached and its group has not ended."""
        group = self.state.groups.of_session(client.number)
        return client.attached and group is not None and not group.ended

    def deciders(self) -> list[Client]:
        """Schedulers of living groups."""
        return [c for c in self.clients if c.scheduler and self.living(c)]

    def decider(self, data: st.DataObject) -> Client | None:
        found = self.deciders()
        return data.draw(st.sampled_from(found), label="scheduler") if found else None

    def space(self, client: Client) -> Any:
        return self.state.namespaces.get(self.state.group_of(client.number).namespace)

    def known(self, client: Client, kv_group: int, named: list[bytes]) -> list[Block | None]:
        """The model's current block under each key."""
        space = self.space(client)
        found = [self.model.blocks.get((space.number, kv_group, each)) for each in named]
        return [block if block and block.epoch == space.epoch else None for block in found]

    # -- coming and going -------------------------------------------------------------------------

    @rule(data=st.data(), engine=st.sampled_from(ENGINES), made=st.sampled_from(CONTRACTS))
    @survives
    def attach_engine(self, data: st.DataObject, engine: tuple[str, str], made: Contract) -> None:
        """The missing members of an engine attach, or only some of them."""
        if engine[0] not in self.tenants:
            return
        here = [c for c in self.clients if c.engine == engine and self.living(c)]
        made = here[0].contract if here else made
        ranks = {c.rank for c in here}
        for rank in range(made.world_size):
            if rank not in ranks and data.draw(st.sampled_from([True, True, True, False])):
                self._attach(engine, made, rank, scheduler=rank == 0)

    def _attach(self, engine: tuple[str, str], made: Contract, rank: int, *, scheduler: bool) -> None:
        tenant, engine_id = engine
        old = next((c for c in self.clients if not c.attached and c.engine == engine), None)
        previous: dict[str, Any] = {}
        if old is not None and old.rank == rank:
            self._goes_quiet(old)
            previous = {
                "previous_boot": old.boot_id,
                "previous_session": old.number,
                "previous_drained": True,
            }
        try:
            attached = self.shell.attach(
                made, tenant, engine_id=engine_id, rank=rank, scheduler=scheduler, **previous
            )
        except KVHearthError as error:
            full_up = {
                Reason.TOO_MANY_SESSIONS: self.state.groups.sessions >= self.limits.sessions_max,
                Reason.TOO_MANY_NAMESPACES: len(self.state.namespaces) >= 3,
            }
            assert full_up.get(error.reason), error
            return
        session = attached.session
        self.clients.append(
            Client(
                session.number,
                session,
                engine,
                session.group,
                made,
                rank,
                scheduler,
                self.engine.boot_id,
            )
        )

    def _goes_quiet(self, client: Client) -> None:
        """The process writes no more, and maps nothing."""
        self.model.quiet([client.number])
        if client.record.lock_byte >= 0:
            self.shell.arena.segments[client.record.segment].held.discard(client.record.lock_byte)
        if client in self.clients:
            self.clients.remove(client)

    @rule(data=st.data(), finished=st.booleans())
    @survives
    def leave(self, data: st.DataObject, finished: bool) -> None:
        here = [c for c in self.clients if c.attached]
        if not here:
            return
        client = data.draw(st.sampled_from(here), label="who leaves")
        group = self.state.groups.of_session(client.number)
        was_ended = group is None or group.ended
        client.attached = False
        if finished:
            self._goes_quiet(client)
        self.engine.leave(client.record, finished=finished)
        ended = self.state.groups.of_session(client.number)
        if not was_ended and (ended is None or ended.ended):
            self.model.end_group(client.group)

    @rule(data=st.data())
    @survives
    def drained(self, data: st.DataObject) -> None:
        gone = [c for c in self.clients if not c.attached]
        if gone:
            self._drain(data.draw(st.sampled_from(gone), label="who is drained"))

    def _drain(self, client: Client) -> None:
        self._goes_quiet(client)
        record = self.engine.sessions.find(client.number)
        if record is not None:
            self.engine.drained(record)

    # -- writing ----------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 9), numbered=st.integers(100, 103))
    @survives
    def reserve(self, data: st.DataObject, count: int, numbered: int) -> None:
        client = self.decider(data)
        if client is None:
            return
        kv_group = data.draw(st.integers(0, len(client.contract.groups) - 1), label="kv group")
        group, space = self.state.group_of(client.number), self.space(client)
        again = group.reservations.get(numbered)
        try:
            reserved = self.engine.call(
                self.core.writing.reserve, client.number, numbered, space.epoch, [(kv_group, count)]
            )
        except KVHearthError as error:
            self._justify(client, kv_group, error.reason, again)
            return
        if again is not None:
            assert [(p.kv_group, p.slots.tolist()) for p in reserved.handed] == [
                (p.kv_group, p.slots.tolist()) for p in again
            ]
            return
        assert group.complete
        assert (numbered, reserved.short) == (numbered, None) or reserved.short is not None
        self._note_handed(client, numbered, reserved)
        if reserved.short is Reason.NO_SPACE:
            self._nothing_evictable(client, kv_group)

    def _note_handed(self, client: Client, number: int, reserved: Reserved) -> None:
        members = [c.number for c in self.clients if c.group == client.group and c.attached]
        taken = [p for held in self.model.held for p in held.places]
        taken += [p for block in self.model.blocks.values() for p in block.places]
        for part in reserved.handed:
            spec = client.contract.groups[part.kv_group]
            for slots, generations in zip(part.slots, part.generations, strict=True):
                extents = self.state.table.extents(slots, spec.page_bytes)
                assert (extents["flags"] == 0).all()
                assert not np.any(extents["checksum"] != np.zeros(1, "V16"))
                found = places(extents)
                for place in found:
                    assert not any(_overlap(place, other) for other in taken), "handed out twice"
                taken += found
                self.model.held.append(
                    Held(
                        client.group,
                        part.kv_group,
                        number,
                        slots.tolist(),
                        generations.tolist(),
                        found,
                        set(members),
                    )
                )

    def _justify(self, client: Client, kv_group: int, reason: Reason, again: object) -> None:
        group, space = self.state.group_of(client.number), self.space(client)
        spec = client.contract.groups[kv_group]
        block = self.state.slot_bytes(spec) * spec.shards
        books = self.state.ledger.segments[group.segment]
        assert again is None or reason is Reason.GROUP_INCOMPLETE
        if reason is Reason.GROUP_INCOMPLETE:
            assert not group.complete
        elif reason is Reason.STOCK_CAP:
            assert group.stock_bytes + group.aside_bytes + block > 0.4 * books.capacity
        elif reason is Reason.HELD_CAP:
            assert books.bound + block > 0.8 * books.capacity
        elif reason is Reason.QUOTA_EXCEEDED:
            assert space.used_bytes + block > space.quota_bytes
            assert not [b for b in self._evictable() if b.namespace == space.number]
        elif reason is Reason.NO_SPACE:
            self._nothing_evictable(client, kv_group)
        else:
            raise AssertionError(reason)

    def _evictable(self) -> Iterator[Block]:
        return (b for b in self.model.blocks.values() if not b.leases and not b.pins)

    def _nothing_evictable(self, client: Client, kv_group: int) -> None:
        """No block of the size, and no slab of another one, could have been taken."""
        spec = client.contract.groups[kv_group]
        size, table = self.state.slot_bytes(spec), self.state.table
        pool = self.state.pools[self.state.segment_of[client.engine[0]]]
        assert pool.unassigned_count == 0
        inside = range(pool.first_slab, pool.end_slab)
        for block in self._evictable():
            slab = block.slots[0] // self.geometry.stride
            assert slab not in inside or table.slab_slot_bytes[slab] != size, block
        for slab in inside:
            if table.slab_slot_bytes[slab] != size:
                rows = pool.slots_in(slab)
                busy = np.isin(table.state[rows], (State.RESERVED, State.QUARANTINED))
                busy |= (table.refs[rows] > 0) | (table.pins[rows] > 0)
                assert busy.any(), f"slab {slab} could have been emptied"

    def _own(self, client: Client) -> list[Held]:
        """What the scheduler may commit: nobody who left may still write to it."""
        here = {c.number for c in self.clients if c.attached}
        return [
            h
            for h in self.model.held
            if h.group == client.group and not h.in_doubt and h.writers <= here
        ]

    @rule(data=st.data(), summed=st.booleans(), parent=st.none() | key_numbers.map(key))
    @survives
    def commit(self, data: st.DataObject, summed: bool, parent: bytes | None) -> None:
        client = self.decider(data)
        own = self._own(client) if client else []
        if client is None or not own:
            return
        kv_group = data.draw(st.sampled_from(sorted({h.kv_group for h in own})), label="kv group")
        mine = [h for h in own if h.kv_group == kv_group]
        chosen = mine[: data.draw(st.integers(1, len(mine)), label="blocks")]
        first = data.draw(st.integers(0, KEYS - 1), label="first key")
        numbers = [(first + i) % KEYS for i in range(len(chosen))]
        if data.draw(st.booleans(), label="odd order"):
            numbers = data.draw(st.lists(key_numbers, min_size=len(chosen), max_size=len(chosen)))
        named = [key(number) for number in numbers]
        blocks = self._write(client, chosen, named, summed=summed)
        present = self.known(client, kv_group, named)
        item = CommitItem(
            kv_group,
            named,
            np.array([h.slots for h in chosen], np.int64),
            np.array([h.generations for h in chosen], np.uint32),
            self._sums(chosen) if summed else None,
            parent or b"",
        )
        self.pending = blocks
        (stored,) = self.engine.call(
            self.core.writing.commit, client.number, self.space(client).epoch, [item]
        )
        expected = [p is None and each not in named[:i] for i, (p, each) in enumerate(zip(present, named, strict=True))]
        assert stored.tolist() == expected
        self._sync()
        for block, new in zip(blocks, stored.tolist(), strict=True):
            if new:
                self.model.blocks[block.namespace, block.kv_group, block.key] = block

    def _write(
        self, client: Client, chosen: list[Held], named: list[bytes], *, summed: bool
    ) -> list[Block]:
        """All ranks write their shards and report."""
        space, blocks = self.space(client), []
        for held, each in zip(chosen, named, strict=True):
            tokens = [
                (space.digest, space.epoch, held.kv_group, each, shard, next(self.serial))
                for shard in range(len(held.places))
            ]
            for place, token in zip(held.places, tokens, strict=True):
                self.memory.write(place, token)
            held.writers = set()
            self.model.held.remove(held)
            blocks.append(
                Block(
                    space.number,
                    held.kv_group,
                    each,
                    space.epoch,
                    held.slots,
                    held.generations,
                    held.places,
                    tokens,
                    summed,
                )
            )
        return blocks

    def _sums(self, chosen: list[Held] | list[Block]) -> Any:
        data = b"".join(self.memory.checksum(place) for held in chosen for place in held.places)
        return np.frombuffer(data, np.uint8).reshape(len(chosen), -1, 16)

    @rule()
    def start_sum(self) -> None:
        """The daemon reads the bytes of one action's blocks on its thread."""
        if not self.engine.to_sum:
            return
        action = self.engine.to_sum.popleft()
        by_slot = {b.slots[0]: b for b in self.model.blocks.values()}
        rows = [
            row
            for row, (slots, generations) in enumerate(
                zip(action.slots.tolist(), action.generations.tolist(), strict=True)
            )
            if (b := by_slot.get(slots[0])) and b.generations == generations and not b.summed
        ]
        if rows:
            sums = self._sums([by_slot[action.slots[row][0]] for row in rows])
            self.sums.append((action.slots[rows], action.generations[rows], sums))

    @rule()
    @survives
    def finish_sum(self) -> None:
        """And reports later; meanwhile the blocks may have gone."""
        if not self.sums:
            return
        slots, generations, sums = self.sums.pop(0)
        pairs = list(zip(slots.tolist(), generations.tolist(), strict=True))
        live = [b for b in self.model.blocks.values() if (b.slots, b.generations) in pairs]
        done = self.engine.call(self.core.writing.summed, slots, generations, sums)
        assert done == sum(not block.summed for block in live)
        for block in live:
            block.summed = True

    @rule(data=st.data(), in_doubt=st.booleans())
    @survives
    def abort(self, data: st.DataObject, in_doubt: bool) -> None:
        client = self.decider(data)
        if client is None:
            return
        here = {c.number for c in self.clients if c.attached}
        own = [
            h
            for h in self.model.held
            if h.group == client.group and (in_doubt or h.writers <= here)
        ]
        if not own:
            return
        chosen = data.draw(st.lists(st.sampled_from(own), min_size=1, max_size=4, unique=True))
        items = [
            SlotsItem(np.array(h.slots, np.int64), np.array(h.generations, np.uint32))
            for h in chosen
        ]
        self._gave_back(chosen, in_doubt=in_doubt)
        freed, aside = self.engine.call(
            self.core.writing.abort, client.number, items, [], in_doubt=in_doubt
        )
        assert (freed == 0) == in_doubt
        assert in_doubt or aside == 0

    def _gave_back(self, chosen: list[Held], *, in_doubt: bool) -> None:
        for held in chosen:
            held.in_doubt = True
            if not in_doubt:
                held.writers = set()
                self.model.held.remove(held)

    @rule(data=st.data(), numbered=st.integers(100, 103))
    @survives
    def abort_reservation(self, data: st.DataObject, numbered: int) -> None:
        """By number: for a client that never saw the answer, so nobody was given the slots."""
        client = self.decider(data)
        if client is None or numbered not in self.state.group_of(client.number).reservations:
            return
        self._gave_back(
            [
                h
                for h in self.model.held
                if (h.group, h.reservation, h.in_doubt) == (client.group, numbered, False)
            ],
            in_doubt=False,
        )
        self.engine.call(self.core.writing.abort, client.number, [], [numbered], in_doubt=False)

    # -- reading ----------------------------------------------------------------------------------

    @rule(data=st.data(), lease_id=st.integers(0, 4))
    @survives
    def lookup(self, data: st.DataObject, lease_id: int) -> None:
        client = self.decider(data)
        if client is None:
            return
        groups = data.draw(
            st.lists(st.integers(0, len(client.contract.groups) - 1), min_size=1, unique=True),
            label="kv groups",
        )
        items = [KeysItem(kv, data.draw(some_keys, label="keys")[: 24 // len(groups)]) for kv in groups]
        mine = [name for name in self.model.leases if name[0] == client.group]
        room = hold_room(self.state, self.state.group_of(client.number).segment)
        call = functools.partial(
            self.engine.call,
            self.core.reading.lookup,
            client.number,
            self.space(client).epoch,
            items,
            lease_id,
        )
        if lease_id and (client.group, lease_id) in self.model.leases:
            with refused(Reason.LEASE_EXISTS):
                call()
            return
        if lease_id and len(mine) >= self.limits.leases_max:
            with refused(Reason.TOO_MANY_LEASES):
                call()
            return
        self._compare(client, items, call(), lease_id, room)

    def _compare(
        self, client: Client, items: list[KeysItem], found: Any, lease_id: int, room: int
    ) -> None:
        known = [self.known(client, item.kv_group, item.keys) for item in items]
        specs = [client.contract.groups[item.kv_group] for item in items]
        ready = [[block is not None and block.summed for block in row] for row in known]
        best = longest_hit(list(zip(specs, ready, strict=True)))
        if found.short is None:
            assert found.hit_tokens == best
        else:
            assert found.short is Reason.HELD_CAP
            assert lease_id
            assert found.hit_tokens < best
        withdrawn = (client.group, lease_id) in self.withdrawn
        granted = lease_id if found.hit_tokens and not withdrawn else 0
        assert found.lease_id == granted
        leased: list[Block] = []
        for one, spec, row, flags in zip(found.groups, specs, known, ready, strict=True):
            assert one.present.tolist() == [block is not None for block in row]
            assert one.ready.tolist() == flags
            need = needed_blocks(spec, found.hit_tokens) if granted else set()
            assert set(np.flatnonzero(one.leased).tolist()) == need
            mine = [row[i] for i in sorted(need)]
            self._served(one.extents, mine)
            leased += mine
        distinct = list(dict.fromkeys(leased))
        if granted:
            for block in distinct:
                block.leases += 1
            self.model.leases[client.group, lease_id] = distinct
            assert hold_room(self.state, self.state.group_of(client.number).segment) >= 0
            assert room >= 0

    def _served(self, extents: Any, blocks: list[Block]) -> None:
        """What a reader gets is what was committed."""
        expected = [
            (slot, generation, place, token)
            for b in blocks
            for slot, generation, place, token in zip(
                b.slots, b.generations, b.places, b.tokens, strict=True
            )
        ]
        assert len(extents) == len(expected)
        for extent, found, (slot, generation, place, token) in zip(
            extents, places(extents), expected, strict=True
        ):
            assert (int(extent["slot"]), int(extent["generation"])) == (slot, generation)
            assert found == place
            assert extent["flags"] & FLAG_SUMMED
            assert extent["checksum"].tobytes() == self.memory.checksum(place)
            self.model.served.append(Served(self.shell.boots, slot, generation, place, token))
        del self.model.served[:-48]

    @rule(data=st.data(), lease_id=st.integers(1, 4))
    def release(self, data: st.DataObject, lease_id: int) -> None:
        client = self.decider(data)
        if client is None:
            return
        call = functools.partial(
            self.engine.call, self.core.reading.release, client.number, [lease_id]
        )
        if (client.group, lease_id) in self.model.leases:
            self.model.drop_lease(client.group, lease_id)
            call()
        else:
            with refused(Reason.UNKNOWN_LEASE):
                call()
            self.withdrawn.add((client.group, lease_id))

    @rule(data=st.data(), named=some_keys)
    def touch(self, data: st.DataObject, named: list[bytes]) -> None:
        client = self.decider(data)
        if client is None:
            return
        kv_group = data.draw(st.integers(0, len(client.contract.groups) - 1), label="kv group")
        expected = [block is not None for block in self.known(client, kv_group, named)]
        items = [KeysItem(kv_group, named)]
        epoch = self.space(client).epoch
        assert self.core.reading.touch(client.number, epoch, items) == sum(expected)
        (one,) = self.core.reading.presence(client.number, epoch, items)
        assert one.present.tolist() == expected

    @rule(data=st.data())
    @survives
    def report_bad(self, data: st.DataObject) -> None:
        """A reader found wrong bytes, and so did the daemon: the block goes, leased or not."""
        client = self.decider(data)
        space = self.space(client) if client else None
        blocks = [
            b for b in self.model.blocks.values() if space and b.namespace == space.number and b.summed
        ]
        if client is None or not blocks:
            return
        block = data.draw(st.sampled_from(blocks), label="bad block")
        shard = data.draw(st.integers(0, len(block.slots) - 1), label="shard")
        item = SlotsItem(
            np.array([block.slots[shard]], np.int64),
            np.array([block.generations[shard]], np.uint32),
        )
        (suspect,) = self.core.reading.suspects(client.number, [item])
        assert suspect.tolist() == block.slots
        head, generation = block.slots[0], block.generations[0]
        self.bad = block
        assert self.engine.call(self.core.reading.remove_bad, head, generation, "reader")
        assert not self.engine.call(self.core.reading.remove_bad, head, generation, "reader")

    # -- keeping and dropping ---------------------------------------------------------------------

    @rule(data=st.data(), pin_id=st.integers(1, 3), named=some_keys, ttl_s=st.sampled_from([1, 50]))
    def pin(self, data: st.DataObject, pin_id: int, named: list[bytes], ttl_s: int) -> None:
        client = self.decider(data)
        if client is None:
            return
        kv_group = data.draw(st.integers(0, len(client.contract.groups) - 1), label="kv group")
        space, now = self.space(client), self.shell.now
        blocks = self.known(client, kv_group, named)
        distinct = list(dict.fromkeys(b for b in blocks if b))
        slots = np.array([s for b in distinct for s in b.slots], np.int64)
        segment = self.state.group_of(client.number).segment
        call = functools.partial(
            self.engine.call,
            self.core.pinning.pin,
            client.number,
            space.epoch,
            pin_id,
            [KeysItem(kv_group, named)],
            ttl_s=float(ttl_s),
            now=now,
        )
        name = (space.number, pin_id)
        if name in self.model.pins:
            reason = Reason.PIN_EXISTS
        elif sum(number == space.number for number, _ in self.model.pins) >= self.limits.pins_max:
            reason = Reason.TOO_MANY_PINS
        elif newly_held_bytes(self.state, slots) > hold_room(self.state, segment):
            reason = Reason.HELD_CAP
        else:
            (flags,) = call()
            assert flags.tolist() == [block is not None for block in blocks]
            for block in distinct:
                block.pins += 1
            self.model.pins[name] = (now + ttl_s, distinct)
            return
        with refused(reason):
            call()

    @rule(data=st.data(), pin_id=st.integers(1, 3))
    def unpin(self, data: st.DataObject, pin_id: int) -> None:
        client = self.decider(data)
        if client is None:
            return
        name = (self.space(client).number, pin_id)
        call = functools.partial(
            self.engine.call, self.core.pinning.unpin, client.number, [pin_id]
        )
        if name in self.model.pins:
            self.model.drop_pin(name)
            call()
        else:
            with refused(Reason.UNKNOWN_PIN):
                call()
