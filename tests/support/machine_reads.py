"""Rules of the core's state machine that read, keep and drop: lookup, lease, pin, epoch, evict."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvhearth.errors import Reason
from kvhearth.model import FLAG_SUMMED
from kvhearth_server.core.lookup import Found, KeysItem
from support.core_kit import slots_item
from support.core_model import Block, Served, longest_hit, needed_blocks, places
from support.machine_base import KEYS, Client, MachineBase, decides, pick, some_keys, survives


class ReadingRules(MachineBase):
    """Compares served blocks with the model; eviction must not touch leased or pinned blocks."""

    @decides(
        lambda self: self.model.blocks,
        lease_ids=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    )
    def lookup(self, data: st.DataObject, client: Client, lease_ids: list[int]) -> None:
        """Look up keys of one group, of some or of all."""
        count = len(client.contract.groups)
        for lease_id in lease_ids:
            first = data.draw(st.integers(0, count - 1), label="first kv group")
            groups = range(first, data.draw(st.integers(first + 1, count), label="end"))
            keys_max = self.limits.keys_max // len(groups)
            items = [KeysItem(kv, data.draw(some_keys)[:keys_max]) for kv in groups]
            self._lookup(client, items, lease_id)

    def _lookup(self, client: Client, items: list[KeysItem], lease_id: int) -> None:
        mine = [name for name in self.model.leases if name[0] == client.group]
        refusal = None
        if lease_id and (client.group, lease_id) in self.model.leases:
            refusal = Reason.LEASE_EXISTS
        elif lease_id and len(mine) >= self.limits.leases_max:
            refusal = Reason.TOO_MANY_LEASES
        place, lookup = (client.number, self.space(client).epoch), self.core.reading.lookup
        found = self.call(lookup, *place, items, lease_id, refusal=refusal)
        if refusal is None:
            self._compare(client, items, found, lease_id)

    def _compare(self, client: Client, items: list[KeysItem], found: Found, lease_id: int) -> None:
        known = [self.known(client, item.kv_group, item.keys) for item in items]
        specs = [client.contract.groups[item.kv_group] for item in items]
        ready = [[block is not None and block.summed for block in row] for row in known]
        best = longest_hit(list(zip(specs, ready, strict=True)))
        if found.short is None:
            assert found.hit_tokens == best
        else:
            assert (found.short, bool(lease_id)) == (Reason.HELD_CAP, True)
            assert found.hit_tokens < best
        withdrawn = (client.group, lease_id) in self.withdrawn
        granted = lease_id if found.hit_tokens and not withdrawn else 0
        assert found.lease_id == granted
        leased: dict[Block, None] = {}
        for one, spec, row, flags in zip(found.groups, specs, known, ready, strict=True):
            assert one.present.tolist() == [block is not None for block in row]
            assert one.ready.tolist() == flags
            assert one.tiers.tolist() == one.present.tolist()
            need = needed_blocks(spec, found.hit_tokens) if granted else set()
            assert set(np.flatnonzero(one.leased).tolist()) == need
            blocks = [block for i in sorted(need) if (block := row[i])]
            self._serve(one.extents, blocks)
            leased |= dict.fromkeys(blocks)
        if granted:
            for block in leased:
                block.leases += 1
            self.model.leases[client.group, lease_id] = list(leased)

    def _serve(self, extents: Any, blocks: list[Block]) -> None:
        """Check that a reader gets the committed content."""
        expected = [
            shard
            for b in blocks
            for shard in zip(b.slots, b.generations, b.places, b.tokens, strict=True)
        ]
        for extent, found, (slot, generation, place, token) in zip(
            extents, places(extents), expected, strict=True
        ):
            assert (int(extent["slot"]), int(extent["generation"])) == (slot, generation)
            assert found == place
            assert extent["flags"] & FLAG_SUMMED
            assert extent["checksum"].tobytes() == self.memory.checksum(place)
            self.model.served.append(Served(self.shell.boots, slot, generation, place, token))
        del self.model.served[:-48]

    @decides(
        lambda self: self.model.leases or len(self.model.blocks) > 8, lease_id=st.integers(1, 4)
    )
    def release(self, data: st.DataObject, client: Client, lease_id: int) -> None:
        known = (client.group, lease_id) in self.model.leases
        if known:
            self.model.drop_lease(client.group, lease_id)
        else:
            self.withdrawn.add((client.group, lease_id))
        refusal = None if known else Reason.UNKNOWN_LEASE
        self.call(self.core.reading.release, client.number, [lease_id], refusal=refusal)

    @decides(lambda self: self.model.blocks, named=some_keys)
    def touch(self, data: st.DataObject, client: Client, named: list[bytes]) -> None:
        kv_group, epoch = self.kv_group(data, client), self.space(client).epoch
        expected = [block is not None for block in self.known(client, kv_group, named)]
        items = [KeysItem(kv_group, named)]
        assert self.core.reading.touch(client.number, epoch, items) == sum(expected)
        (one,), _, _ = self.core.reading.presence(client.number, epoch, items)
        assert one.present.tolist() == expected
        assert not one.leased.any()

    @decides(lambda self: self.model.blocks)
    def report_bad(self, data: st.DataObject, client: Client) -> None:
        """Remove a block whose bytes a reader and the daemon found wrong, leased or not."""
        number = self.space(client).number
        blocks = [b for b in self.model.blocks.values() if b.namespace == number and b.summed]
        if not blocks:
            return
        self.bad = block = pick(data, blocks, "bad block")
        shard = data.draw(st.integers(0, len(block.slots) - 1), label="shard")
        item = slots_item(block.slots[shard : shard + 1], block.generations[shard : shard + 1])
        (suspect,) = self.core.reading.suspects(client.number, [item])
        assert suspect.tolist() == [block.slots]
        place = np.array(block.slots[:1]), np.array(block.generations[:1], np.uint32)
        assert self.call(self.core.reading.remove_bad, *place)
        assert not self.call(self.core.reading.remove_bad, *place)

    # -- keeping and dropping ---------------------------------------------------------------------

    @decides(
        lambda self: self.model.blocks,
        pin_id=st.integers(1, 3),
        named=some_keys,
        ttl_s=st.sampled_from([1, 50]),
    )
    def pin(
        self, data: st.DataObject, client: Client, pin_id: int, named: list[bytes], ttl_s: int
    ) -> None:
        kv_group, space = self.kv_group(data, client), self.space(client)
        blocks = self.known(client, kv_group, named)
        distinct = list(dict.fromkeys(block for block in blocks if block))
        slots = np.array([slot for block in distinct for slot in block.slots], np.int64)
        books = self.state.books[self.state.group_of(client.number).segment]
        room = int(books.capacity * self.limits.pinned_fraction_max) - books.pinned
        fresh = slots[self.state.table.pins[slots] == 0]
        mine = [name for name in self.model.pins if name[0] == space.number]
        name, refusal = (space.number, pin_id), None
        if name in mine:
            refusal = Reason.PIN_EXISTS
        elif len(mine) >= self.limits.pins_max or self.state.table.total_bytes(fresh) > room:
            refusal = Reason.TOO_MANY_PINS
        flags = self.call(
            self.core.pinning.pin,
            client.number,
            space.epoch,
            pin_id,
            [KeysItem(kv_group, named)],
            ttl_s=float(ttl_s),
            now=self.shell.now,
            refusal=refusal,
        )
        if refusal is None:
            assert flags[0].tolist() == [block is not None for block in blocks]
            for block in distinct:
                block.pins += 1
            self.model.pins[name] = (self.shell.now + ttl_s, distinct)

    @decides(lambda self: self.model.pins or len(self.model.blocks) > 8, pin_id=st.integers(1, 3))
    def unpin(self, data: st.DataObject, client: Client, pin_id: int) -> None:
        name = (self.space(client).number, pin_id)
        known = name in self.model.pins
        if known:
            self.model.drop_pin(name)
        refusal = None if known else Reason.UNKNOWN_PIN
        self.call(self.core.pinning.unpin, client.number, [pin_id], refusal=refusal)

    @precondition(lambda self: self.model.pins)
    @rule(seconds=st.sampled_from([1, 50]))
    @survives
    def time_passes(self, seconds: int) -> None:
        """Let time pass: pins expire, and nothing else does."""
        self.shell.now += seconds
        over = [name for name, (end, _) in self.model.pins.items() if end <= self.shell.now]
        for name in over:
            self.model.drop_pin(name)
        assert self.call(self.core.pinning.expire, self.shell.now) == len(over)

    @decides(lambda self: len(self.model.blocks) > 4 and self.quiet_steps % 3 == 0)
    def bump_epoch(self, data: st.DataObject, client: Client) -> None:
        space = self.space(client)
        epoch = space.epoch
        stale = Reason.STALE_EPOCH
        self.call(self.core.bump_epoch, client.number, epoch + 1, refusal=stale)
        assert self.call(self.core.bump_epoch, client.number, epoch) == epoch + 1
        self.model.drop_pins_of({space.number})

    @precondition(lambda self: len(self.model.blocks) > KEYS // 2)
    @rule(data=st.data(), keep_bytes=st.sampled_from([0, 20_000, 60_000]))
    @survives
    def evict(self, data: st.DataObject, keep_bytes: int) -> None:
        """Shrink a namespace, as an operator would."""
        spaces = {space.number: space for space in self.state.namespaces}
        if not spaces:
            return
        space = spaces[data.draw(st.sampled_from(sorted(spaces)), label="namespace")]
        self.shrinking = space.number
        mine = [b for b in self.model.blocks.values() if b.namespace == space.number]
        count = self.call(self.core.evict, space.digest, keep_bytes)
        self.sync()
        left = [b for b in self.model.blocks.values() if b.namespace == space.number]
        assert count == len(mine) - len(left)
        assert space.used_bytes <= keep_bytes or all(b.leases for b in left)
