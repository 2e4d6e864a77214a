"""Rules of the core's state machine that write: reserve, commit, sum, abort."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.reservations import Reserved, SlotsItem
from kvhearth_server.core.slot_table import State
from support.core_kit import key, slots_item
from support.core_model import Block, Held, places
from support.machine_base import (
    HELD_FRACTION,
    KEYS,
    STOCK_FRACTION,
    Client,
    MachineBase,
    decides,
    key_numbers,
    mostly,
    overlap,
    pick,
    portions,
    starts,
    survives,
)

RESERVATIONS = st.integers(100, 107)
REPEAT_REFUSALS = {
    Reason.ALREADY_COMMITTED,
    Reason.NOT_RESERVED,
    Reason.STALE_EXTENT,
    Reason.FOREIGN_EXTENT,
    Reason.BAD_EXTENTS,
}
"""Possible refusals of a message that arrives twice; which one, depends on the fate of its
slots.
"""


class WritingRules(MachineBase):
    """Clients that follow the protocol, and messages that arrive twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_commits: list[tuple[tuple[str, int], CommitItem]] = []
        self.sent_aborts: list[tuple[tuple[str, int], SlotsItem]] = []

    # -- reserve ----------------------------------------------------------------------------------

    @decides(lambda self: self.quiet_steps % 3 != 0, count=st.integers(1, 8), numbered=RESERVATIONS)
    def reserve(self, data: st.DataObject, client: Client, count: int, numbered: int) -> None:
        """Reserve under a number that may have been used before."""
        portion = data.draw(portions, label="portion")
        self._reserve(client, [(self.kv_group(data, client), count)], numbered, portion)

    @decides(counts=st.lists(st.integers(1, 8), min_size=1, max_size=3))
    def store(self, data: st.DataObject, client: Client, counts: list[int]) -> None:
        """Reserve and commit at once, runs of keys: the usual way."""
        every = data.draw(st.sampled_from([False, False, True]), label="all kv groups")
        groups = range(len(client.contract.groups)) if every else [self.kv_group(data, client)]
        first, summed = data.draw(starts, label="first key"), data.draw(mostly, label="summed")
        portion = data.draw(portions, label="portion")
        for count in counts:
            wants = [(kv, count) for kv in groups]
            self._reserve(client, wants, next(self.serial) + 1000, portion)
            parts = []
            for kv_group in groups:
                mine = [held for held in self._own(client) if held.kv_group == kv_group][:count]
                numbers = [(first + i) % KEYS for i in range(len(mine))]
                if mine:
                    parts.append((mine, numbers))
            parent = key(first - 1) if first else b""
            self._commit(client, parts, summed=summed, parent=parent)
            first = (first + count) % KEYS

    def _reserve(
        self,
        client: Client,
        wants: list[tuple[int, int]],
        numbered: int,
        portion: int | None = None,
    ) -> None:
        group, space = self.state.group_of(client.number), self.space(client)
        known = group.reservations.get(numbered)
        again = None if known is None or known.in_doubt else list(known.handed)
        self.shrinking = space.number
        try:
            reserved = self.call(
                self.core.writing.reserve, client.number, numbered, space.epoch, wants, portion
            )
            while reserved.more:
                assert portion is not None
                reserved = self.call(
                    self.core.writing.reserve_more, client.number, numbered, space.epoch, portion
                )
        except KVHearthError as error:
            self.sync()
            self._justify(client, wants[0][0], error.reason, again, numbered)
            return
        self.sync()
        assert group.complete
        if again is not None:
            assert reserved.handed == again
            return
        self._note_handed(client, numbered, reserved)
        granted = {part.kv_group: len(part.slots) for part in reserved.handed}
        short = [kv_group for kv_group, count in wants if granted.get(kv_group, 0) < count]
        assert bool(short) == (reserved.short is not None)
        if reserved.short is not None:
            self._justify(client, short[0], reserved.short, None)

    def _note_handed(self, client: Client, numbered: int, reserved: Reserved) -> None:
        writers = {c.number for c in self.attached() if c.group == client.group}
        taken = [place for held in self.model.held for place in held.places]
        taken += [place for block in self.model.blocks.values() for place in block.places]
        for part in reserved.handed:
            length = client.contract.groups[part.kv_group].page_bytes
            for slots, generations in zip(part.slots, part.generations, strict=True):
                extents = self.state.table.extents(slots, length)
                assert not extents["flags"].any()
                assert not extents["checksum"].tobytes().strip(b"\0")
                found = places(extents)
                for place in found:
                    assert not any(overlap(place, other) for other in taken), "handed out twice"
                taken += found
                shards = slots.tolist(), generations.tolist(), found
                held = Held(*shards, part.kv_group, client.group, numbered, set(writers))
                self.model.held.append(held)

    def _justify(
        self, client: Client, kv_group: int, reason: Reason, again: object, numbered: int = 0
    ) -> None:
        """Check that the bound given as the reason was really met, by one block more."""
        group, space = self.state.group_of(client.number), self.space(client)
        spec = client.contract.groups[kv_group]
        block = self.state.slot_bytes(spec) * spec.shards
        books = self.state.books[group.segment]
        if reason is Reason.GROUP_INCOMPLETE:
            assert not group.complete
            return
        if reason is Reason.NOT_RESERVED:
            assert group.reservations[numbered].in_doubt
            return
        assert again is None
        if reason is Reason.STOCK_CAP:
            held = group.stock_bytes + group.quarantined_bytes
            if held + block <= STOCK_FRACTION * books.capacity:
                here = [g for g in self.state.groups if g.segment == group.segment]
                assert any(g.stock_bytes for g in here if g is not group), "it is alone"
                free = int(HELD_FRACTION * books.capacity) - books.reserved - books.quarantined
                assert held + block > free - block
        elif reason is Reason.HELD_CAP:
            assert books.bound + block > HELD_FRACTION * books.capacity
        elif reason is Reason.QUOTA_EXCEEDED:
            assert space.quota_bytes is not None
            groups = [g for g in self.state.groups if g.namespace == space.number]
            taken = sum(g.stock_bytes + g.quarantined_bytes for g in groups)
            if taken + block <= space.quota_bytes // 2 or not taken:
                assert space.used_bytes + block > space.quota_bytes
                assert not [b for b in self._evictable() if b.namespace == space.number]
        elif reason is Reason.NO_SPACE:
            self._nothing_evictable(client, kv_group)
        else:
            raise AssertionError(reason)

    def _evictable(self) -> Iterator[Block]:
        return (b for b in self.model.blocks.values() if not b.leases and not b.pins)

    def _nothing_evictable(self, client: Client, kv_group: int) -> None:
        """Check that no block of the size, and no slab of another size, could have been taken."""
        spec = client.contract.groups[kv_group]
        size, table = self.state.slot_bytes(spec), self.state.table
        pool = self.state.pools[self.state.segment_of[client.engine[0]]]
        assert pool.unassigned_count == 0
        inside = range(pool.first_slab, pool.end_slab)
        for block in self._evictable():
            slab = block.slots[0] // self.geometry.stride
            assert slab not in inside or table.slab_slot_bytes[slab] != size, block
        for slab in inside:
            if table.slab_slot_bytes[slab] not in (0, size):  # 0: its memory is withheld
                rows = pool.slots_in(slab)
                busy = np.isin(table.state[rows], (State.RESERVED, State.QUARANTINED))
                busy |= (table.refs[rows] > 0) | (table.pins[rows] > 0)
                assert busy.any(), f"slab {slab} could have been emptied"

    # -- commit -----------------------------------------------------------------------------------

    def _reported(self, client: Client) -> list[Held]:
        """Return the slots of a scheduler's group whose writers are all attached and can report."""
        here = {c.number for c in self.attached()}
        return [h for h in self.model.held if h.group == client.group and h.writers <= here]

    def _own(self, client: Client) -> list[Held]:
        """Return the slots that the scheduler may commit."""
        return [held for held in self._reported(client) if not held.in_doubt]

    @decides(
        lambda self: self.model.held, summed=st.booleans(), parent=st.none() | key_numbers.map(key)
    )
    def commit(
        self, data: st.DataObject, client: Client, summed: bool, parent: bytes | None
    ) -> None:
        """Commit some of the held slots, under any keys in any order."""
        own = self._own(client)
        if not own:
            return
        kv_group = data.draw(st.sampled_from(sorted({h.kv_group for h in own})), label="kv group")
        mine = [held for held in own if held.kv_group == kv_group]
        chosen = mine[: data.draw(st.integers(1, len(mine)), label="blocks")]
        count = len(chosen)
        numbers = data.draw(st.lists(key_numbers, min_size=count, max_size=count), label="keys")
        self._commit(client, [(chosen, numbers)], summed=summed, parent=parent or b"")

    def _commit(
        self,
        client: Client,
        parts: list[tuple[list[Held], list[int]]],
        *,
        summed: bool,
        parent: bytes,
    ) -> None:
        """Commit blocks under numbered keys, in one call; each part belongs to one KV group."""
        expected, items, blocks = [], [], []
        for chosen, numbers in parts:
            named = [key(number) for number in numbers]
            present = self.known(client, chosen[0].kv_group, named)
            fresh = [
                block is None and each not in named[:i]
                for i, (block, each) in enumerate(zip(present, named, strict=True))
            ]
            written = self._write(client, chosen, named, summed=summed)
            expected.append(fresh)
            blocks += written
            items.append(
                CommitItem(
                    chosen[0].kv_group,
                    named,
                    np.array([held.slots for held in chosen], np.int64),
                    np.array([held.generations for held in chosen], np.uint32),
                    self._sums(written) if summed else None,
                    parent,
                )
            )
        self.pending = blocks
        self.sent_commits += [(client.place, item) for item in items]
        stored = self.call(self.core.writing.commit, client.number, self.space(client).epoch, items)
        assert [flags.tolist() for flags in stored] == expected
        self.sync()
        for block, new in zip(blocks, itertools.chain(*expected), strict=True):
            if new:
                self.model.blocks[block.name] = block

    def _write(
        self, client: Client, chosen: list[Held], named: list[bytes], *, summed: bool
    ) -> list[Block]:
        """Let all ranks write their shards and report."""
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
            shards = held.slots, held.generations, held.places, held.kv_group
            blocks.append(Block(*shards, space.number, each, space.epoch, tokens, summed))
        return blocks

    def _sums(self, blocks: list[Block]) -> Any:
        data = b"".join(self.memory.checksum(place) for b in blocks for place in b.places)
        return np.frombuffer(data, np.uint8).reshape(len(blocks), -1, 16)

    @decides(lambda self: self.sent_commits and self.quiet_steps % 4 == 1)
    def repeat_commit(self, data: st.DataObject, client: Client) -> None:
        """Repeat a commit that was applied."""
        sent = [item for place, item in self.sent_commits[-8:] if place == client.place]
        if not sent:
            return
        item = pick(data, sent, "commit")
        self._refused_again(
            self.core.writing.commit, client.number, self.space(client).epoch, [item]
        )

    def _refused_again(self, function: Any, *arguments: Any, **options: Any) -> None:
        try:
            self.call(function, *arguments, **options)
        except KVHearthError as error:
            if error.reason not in REPEAT_REFUSALS:
                raise
        else:
            raise AssertionError("a message that arrived twice was applied twice")

    # -- sum --------------------------------------------------------------------------------------

    @precondition(lambda self: self.engine.to_sum)
    @rule()
    def start_sum(self) -> None:
        """Let the daemon's checksum thread read the bytes of one action's blocks."""
        action = self.engine.to_sum.popleft()
        by_slot = {block.slots[0]: block for block in self.model.blocks.values()}
        rows = []
        for row, generations in enumerate(action.generations.tolist()):
            block = by_slot.get(int(action.slots[row, 0]))
            if block and block.generations == generations and not block.summed:
                rows.append(row)
        if rows:
            sums = self._sums([by_slot[int(action.slots[row, 0])] for row in rows])
            self.sums.append((action.slots[rows], action.generations[rows], sums))

    @precondition(lambda self: self.sums and self.quiet_steps % 3 == 0)
    @rule(data=st.data())
    @survives
    def finish_sum(self, data: st.DataObject) -> None:
        """Report checksums later; meanwhile the blocks may be gone, and others be in their
        slots.
        """
        which = data.draw(st.integers(0, len(self.sums) - 1), label="which sums")
        slots, generations, sums = self.sums.pop(which)
        pairs = list(zip(slots.tolist(), generations.tolist(), strict=True))
        live = [
            block
            for block in self.model.blocks.values()
            if (block.slots, block.generations) in pairs and not block.summed
        ]
        done = self.call(self.core.writing.summed, slots, generations, sums)
        assert done == len(live)
        for block in live:
            block.summed = True

    # -- abort ------------------------------------------------------------------------------------

    @decides(lambda self: self.model.held, in_doubt=st.booleans())
    def abort(self, data: st.DataObject, client: Client, in_doubt: bool) -> None:
        mine = [held for held in self.model.held if held.group == client.group]
        own = mine if in_doubt else self._reported(client)
        if not own:
            return
        indices = st.lists(st.integers(0, len(own) - 1), min_size=1, max_size=4, unique=True)
        chosen = [own[index] for index in data.draw(indices, label="blocks")]
        items = [slots_item(held.slots, held.generations) for held in chosen]
        self._gave_back(chosen, in_doubt=in_doubt)
        # A report frees nothing while a member that left without a goodbye may be writing.
        has_undrained_member = self.state.group_of(client.number).has_undrained_member
        freed, quarantined = self.call(
            self.core.writing.abort, client.number, items, [], in_doubt=in_doubt
        )
        assert (freed == 0) == (in_doubt or has_undrained_member)
        assert in_doubt or has_undrained_member or quarantined == 0
        if freed:
            self.sent_aborts += [(client.place, item) for item in items]

    def _gave_back(self, chosen: list[Held], *, in_doubt: bool) -> None:
        for held in chosen:
            held.in_doubt = True
            if not in_doubt:
                held.writers = set()
                self.model.held.remove(held)

    @decides(lambda self: self.sent_aborts)
    def repeat_abort(self, data: st.DataObject, client: Client) -> None:
        """Repeat an abort that was applied, perhaps after the slots were reused."""
        sent = [item for place, item in self.sent_aborts[-8:] if place == client.place]
        if not sent:
            return
        item = pick(data, sent, "abort")
        self._refused_again(self.core.writing.abort, client.number, [item], [], in_doubt=False)

    @decides(lambda self: self.model.held, numbered=RESERVATIONS, in_doubt=st.booleans())
    def abort_reservation(
        self, data: st.DataObject, client: Client, numbered: int, in_doubt: bool
    ) -> None:
        """Abort by number, for a client that never saw the answer; perhaps after an abort in
        doubt.
        """
        group = self.state.group_of(client.number)
        record = group.reservations.get(numbered)
        if record is None:
            return
        named = [slots for part in record.handed for slots in part.slots.tolist()]
        chosen = [
            held
            for held in self.model.held
            if (held.group, held.reservation) == (client.group, numbered) and held.slots in named
        ]
        reported = self._reported(client)
        if in_doubt or all(held in reported for held in chosen):
            self._gave_back(chosen, in_doubt=in_doubt)
            self.call(self.core.writing.abort, client.number, [], [numbered], in_doubt=in_doubt)
            if not (in_doubt or group.has_undrained_member):
                slots = [slot for held in chosen for slot in held.slots]
                assert not np.isin(
                    self.state.table.state[slots], (State.RESERVED, State.QUARANTINED)
                ).any()
