"""Rules of the core's state machine that break the protocol: each must be refused for the
documented reason, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvhearth.errors import Reason
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.membership import Joining
from support.core_kit import contract, full, key, keys, slots_item
from support.core_model import Block, Held, snapshot
from support.machine_base import Client, MachineBase, decides, pick

Refusal = tuple[str, Reason, Callable[[], object]]


def commit_item(shards: Held | Block) -> CommitItem:
    """Return a commit of one block under key 0, to its slots."""
    slots = np.array([shards.slots], np.int64)
    generations = np.array([shards.generations], np.uint32)
    return CommitItem(shards.kv_group, keys(0), slots, generations, None, b"")


class RefusalRules(MachineBase):
    """Clients that violate the protocol."""

    @decides(lambda self: self.quiet_steps % 3 == 0)
    def break_every_rule(self, data: st.DataObject, client: Client) -> None:
        """Do everything that no client should do."""
        wrong = [*self._wrong_keys(client), *self._wrong_pins(client), *self._wrong_joins(client)]
        mine = [h for h in self.model.held if h.group == client.group and not h.in_doubt]
        if mine:
            wrong += self._wrong_slots(client, pick(data, mine, "block"))
        before = snapshot(self.core)
        for name, reason, call in wrong:
            try:
                self.call(call, refusal=reason)
            except BaseException as error:
                error.add_note(f"what was wrong: {name}")
                raise
        assert snapshot(self.core) == before, "a refused call changed something"

    def _wrong_keys(self, client: Client) -> Iterator[Refusal]:
        session, epoch = client.number, self.space(client).epoch
        none = len(client.contract.groups)
        reading, writing = self.core.reading, self.core.writing
        many = [KeysItem(0, [key(0)] * 25)]
        for group in (none, -1, 255):
            item = [KeysItem(group, keys(1))]
            yield "lookup", Reason.BAD_GROUP, lambda i=item: reading.lookup(session, epoch, i, 0)
            yield "touch", Reason.BAD_GROUP, lambda i=item: reading.touch(session, epoch, i)
        twice = [KeysItem(0, keys(1)), KeysItem(0, keys(1))]
        yield "twice", Reason.BAD_GROUP, lambda: reading.lookup(session, epoch, twice, 0)
        yield "many", Reason.TOO_MANY_KEYS, lambda: reading.lookup(session, epoch, many, 0)
        yield "many", Reason.TOO_MANY_KEYS, lambda: reading.touch(session, epoch, many)
        one = [KeysItem(0, keys(1))]
        for other in (epoch - 1, epoch + 1, 0):
            yield "epoch", Reason.STALE_EPOCH, lambda e=other: reading.lookup(session, e, one, 0)
            yield "epoch", Reason.STALE_EPOCH, lambda e=other: writing.reserve(session, 9, e, [])
            yield "epoch", Reason.STALE_EPOCH, lambda e=other: writing.commit(session, e, [])
        yield "no session", Reason.GROUP_GONE, lambda: reading.lookup(1 << 40, epoch, one, 0)
        gone = [c for c in self.clients if not c.attached]
        if gone:
            number = gone[0].number
            yield "gone", Reason.GROUP_GONE, lambda: reading.lookup(number, epoch, one, 0)
            yield "gone", Reason.GROUP_GONE, lambda: writing.commit(number, epoch, [])
            yield "gone", Reason.GROUP_GONE, lambda: self.core.bump_epoch(number, epoch)
            abort = writing.abort
            yield "gone", Reason.GROUP_GONE, lambda: abort(number, [], [1], in_doubt=False)
        if self.state.group_of(session).complete:
            count = [(0, 25)]
            yield "many", Reason.TOO_MANY_KEYS, lambda: writing.reserve(session, 9, epoch, count)
            strange = [(0, 1), (none, 1)]
            yield "group", Reason.BAD_GROUP, lambda: writing.reserve(session, 9, epoch, strange)
        nobody = b"\0" * 32
        yield "namespace", Reason.UNKNOWN_NAMESPACE, lambda: self.core.evict(nobody, 0)

    def _wrong_pins(self, client: Client) -> Iterator[Refusal]:
        session, epoch = client.number, self.space(client).epoch
        pin, one = self.core.pinning.pin, [KeysItem(0, keys(1))]
        many = [KeysItem(0, [key(0)] * 25)]
        for ttl in (0.0, -1.0, 101.0, float("nan"), float("inf")):
            yield "ttl", Reason.BAD_TTL, lambda t=ttl: pin(session, epoch, 9, one, ttl_s=t, now=0.0)
        yield "id", Reason.PIN_EXISTS, lambda: pin(session, epoch, 0, one, ttl_s=1.0, now=0.0)
        late = epoch + 1
        yield "epoch", Reason.STALE_EPOCH, lambda: pin(session, late, 9, one, ttl_s=1.0, now=0.0)
        yield "many", Reason.TOO_MANY_KEYS, lambda: pin(session, epoch, 9, many, ttl_s=1.0, now=0.0)
        unpin = self.core.pinning.unpin
        yield "unpin", Reason.UNKNOWN_PIN, lambda: unpin(session, [77, 78])

    def _wrong_joins(self, client: Client) -> Iterator[Refusal]:
        if self.state.groups.sessions >= self.limits.sessions_max:
            return
        tenant, engine_id = client.engine
        join, made = self.core.membership.join, client.contract
        running = self.state.group_of(client.number).incarnation

        again = Joining(1 << 41, tenant, engine_id, made, True, 0, 0, mapped=True)

        def joining(**changes: Any) -> Callable[[], object]:
            return lambda: join(replace(again, **changes))

        yield "scheduler", Reason.RANK_TAKEN, joining()
        yield "rank", Reason.RANK_TAKEN, joining(scheduler=False)
        yield "processes", Reason.RANK_TAKEN, joining(process_group="other")
        yield "processes", Reason.BAD_MESSAGE, joining(process_group="p" * 257)
        yield "rank", Reason.BAD_MESSAGE, joining(rank=made.world_size)
        yield "rank", Reason.BAD_MESSAGE, joining(rank=-2)
        yield "role", Reason.BAD_MESSAGE, joining(scheduler=False, rank=-1)
        yield "name", Reason.BAD_MESSAGE, joining(engine_id="")
        yield "name", Reason.BAD_MESSAGE, joining(engine_id="e" * 257)
        yield "incarnation", Reason.STALE_INCARNATION, joining(incarnation=running + 1)
        yield "incarnation", Reason.STALE_INCARNATION, joining(engine_id="new", incarnation=1)
        other = contract(full(block_tokens=2), revision="another")
        yield "contract", Reason.CONTRACT_MISMATCH, joining(contract=other)
        huge = contract(full(70_000))
        yield "page", Reason.BAD_CONTRACT, joining(contract=huge, engine_id="new")

    def _wrong_slots(self, client: Client, held: Held) -> Iterator[Refusal]:
        good = commit_item(held)

        def commit(*items: CommitItem, **change: Any) -> Callable[[], object]:
            """Commit the items, or the good one with a change."""
            sent = [*items] if items else [replace(good, **change)]
            session, epoch = client.number, self.space(client).epoch
            return lambda: self.core.writing.commit(session, epoch, sent)

        def abort(slots: list[int], generations: list[int]) -> Callable[[], object]:
            item = slots_item(slots, generations)
            return lambda: self.core.writing.abort(client.number, [item], [], in_doubt=False)

        yield "twice", Reason.BAD_EXTENTS, commit(good, good)
        for slot in (-1, self.geometry.slot_count, (1 << 32) - 1):
            slots = np.array([[slot, *held.slots[1:]]], np.int64)
            yield "slot", Reason.BAD_EXTENTS, commit(slots=slots)
            yield "slot", Reason.BAD_EXTENTS, commit(good, replace(good, slots=slots))
            yield "slot", Reason.BAD_EXTENTS, abort([slot], [0])
        wide = np.array([[*held.slots, held.slots[0]]], np.int64)
        yield "shape", Reason.BAD_EXTENTS, commit(slots=wide)
        yield "shape", Reason.BAD_EXTENTS, commit(generations=good.generations[0, :1])
        sums = np.zeros((1, len(held.slots), 15), np.uint8)
        yield "sums", Reason.BAD_CHECKSUMS, commit(checksums=sums)
        yield "parent", Reason.BAD_KEYS, commit(parent=b"x" * 31)
        yield "group", Reason.BAD_GROUP, commit(kv_group=len(client.contract.groups))
        for change in (1, -1):
            stale = good.generations + np.uint32(change % (1 << 32))
            yield "stale", Reason.STALE_EXTENT, commit(generations=stale)
            yield "stale", Reason.STALE_EXTENT, abort(held.slots, stale[0].tolist())
        # Slots that belong to others, or hold a block already.
        alive = {group.number for group in self.state.groups if not group.ended}
        others: list[tuple[str, Reason, Held | Block]] = [
            ("foreign", Reason.FOREIGN_EXTENT, other)
            for other in self.model.held
            if other.group in alive - {client.group} and not other.in_doubt
        ]
        blocks = self.model.blocks.values()
        others += [("done", Reason.ALREADY_COMMITTED, block) for block in blocks]
        for name, reason, other in others:
            if len(other.slots) == len(held.slots):
                item = replace(commit_item(other), kv_group=held.kv_group)
                yield name, reason, commit(item)
            yield name, reason, abort(other.slots, other.generations)
