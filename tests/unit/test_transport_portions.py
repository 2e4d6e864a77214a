"""Large reservations and commits yield the loop to other tasks, and leak nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import Rig, contract, key, keys, no_deadline, sums_of
from support.core_shell import Shell

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, unpack_bits
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.groups import SlotGrant
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.core.state import Limits
from kvhearth_server.transport.dispatch import (
    BOUND_PER_TURN_MAX,
    EVICTED_PER_TURN_MAX,
    Dispatcher,
)

BLOCKS = 2048


class Calls:
    """An engine and a session that makes reservations and commits; at first the engine is full."""

    def __init__(self) -> None:
        geometry = Geometry.of([("t", BLOCKS * 4096)], 1 << 16, 4096)
        shell = Shell(geometry, Limits(held_fraction_max=1.0, stock_fraction_max=1.0))
        self.engine = shell.engine
        attached = shell.attach(contract(), "t", map_arena=True)
        self.session, self.epoch = attached.session, attached.welcome.epoch
        writing, number = self.engine.core.writing, self.session.number
        (part,) = self.engine.call(writing.reserve, number, 1, self.epoch, [(0, BLOCKS)]).handed
        sums = sums_of(part.slots)
        item = CommitItem(0, keys(*range(BLOCKS)), part.slots, part.generations, sums, b"")
        self.engine.call(writing.commit, number, self.epoch, [item])
        self.dispatcher = Dispatcher(self.engine, None)  # type: ignore[arg-type]

    @property
    def blocks(self) -> int:
        """Number of blocks left."""
        return next(iter(self.engine.core.state.namespaces)).blocks

    def reserve(self, count: int) -> Any:
        """Returns the reply, or an awaitable of it."""
        group = types_pb2.GroupCount(group=0, count=count)
        request = cache_pb2.ReserveRequest(reservation_id=2, epoch=self.epoch, groups=[group])
        return self.dispatcher.decide("Reserve", request, self.session)

    def commit(self, part: SlotGrant, first: int = BLOCKS) -> Any:
        """Returns the reply, or an awaitable of it, to a commit of new keys from ``first`` on."""
        count = len(part.slots)
        named = cache_pb2.GroupCommit(
            group=0,
            keys=b"".join(keys(*range(first, first + count))),
            slots=part.slots.astype("<u4").tobytes(),
            generations=part.generations.astype("<u4").tobytes(),
            checksums=sums_of(part.slots).tobytes(),
        )
        request = cache_pb2.CommitRequest(epoch=self.epoch, groups=[named])
        return self.dispatcher.decide("Commit", request, self.session)

    def slots(self, count: int) -> SlotGrant:
        """Reserve in one piece."""
        writing, number = self.engine.core.writing, self.session.number
        (part,) = self.engine.call(writing.reserve, number, 3, self.epoch, [(0, count)]).handed
        return part

    @property
    def reserved(self) -> int:
        """Number of reserved slots."""
        return int((self.engine.core.state.table.state == State.RESERVED).sum())

    def with_others(self, reply: Awaitable[Any], other: Callable[[], None]) -> Any:
        """Waits for a reply while another task runs whenever the loop has a turn for it."""

        async def main() -> Any:
            task = asyncio.ensure_future(reply)
            while not task.done():
                other()
                await asyncio.sleep(0)
            return await task

        return asyncio.run(asyncio.wait_for(main(), 60))


def test_others_have_their_turn_between_two_portions() -> None:
    calls = Calls()
    seen = [calls.blocks]
    reply = calls.with_others(calls.reserve(BLOCKS), lambda: seen.append(calls.blocks))
    (part,) = reply.groups
    assert len(np.unique(np.frombuffer(part.extents, EXTENT_DTYPE)["slot"])) == BLOCKS
    assert part.count == BLOCKS
    assert reply.short_reason == ""
    steps = -np.diff([*seen, calls.blocks])
    assert steps.sum() == BLOCKS
    assert steps.max() <= EVICTED_PER_TURN_MAX


def test_a_small_one_is_answered_at_once() -> None:
    calls = Calls()
    reply = calls.reserve(EVICTED_PER_TURN_MAX)
    assert not isawaitable(reply)
    assert reply.groups[0].count == EVICTED_PER_TURN_MAX


def test_what_ends_it_in_between_gives_its_slots_back() -> None:
    calls = Calls()

    def bump() -> None:
        space = next(iter(calls.engine.core.state.namespaces))
        if space.epoch == calls.epoch and calls.blocks < BLOCKS - EVICTED_PER_TURN_MAX:
            calls.engine.call(calls.engine.core.bump_namespace, space.digest)

    with pytest.raises(KVHearthError) as caught:
        calls.with_others(calls.reserve(BLOCKS), bump)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert not (calls.engine.core.state.table.state == State.RESERVED).any()
    assert 0 < calls.blocks < BLOCKS
    calls.engine.core.check_books()


COMMITTED = 3 * BOUND_PER_TURN_MAX + 5


def test_others_have_their_turn_while_a_commit_binds() -> None:
    calls = Calls()
    part = calls.slots(COMMITTED)
    seen = [calls.blocks]
    reply = calls.with_others(calls.commit(part), lambda: seen.append(calls.blocks))
    assert unpack_bits(reply.stored[0].bits, COMMITTED).all()
    steps = np.diff([*seen, calls.blocks])
    assert steps.sum() == COMMITTED
    assert steps.max() <= BOUND_PER_TURN_MAX
    core = calls.engine.core
    space = next(iter(core.state.namespaces))
    heads = core.state.index.find(space.number, 0, keys(*range(BLOCKS, BLOCKS + COMMITTED)))
    assert heads.tolist() == part.slots[:, 0].tolist()
    parents = [core.state.chains.parent_of(head) for head in heads[1:].tolist()]
    assert parents == heads[:-1].tolist()
    core.check_books()


def test_a_small_commit_is_answered_at_once() -> None:
    calls = Calls()
    reply = calls.commit(calls.slots(BOUND_PER_TURN_MAX))
    assert not isawaitable(reply)
    assert unpack_bits(reply.stored[0].bits, BOUND_PER_TURN_MAX).all()


def test_a_large_commit_with_one_bad_slot_binds_nothing() -> None:
    calls = Calls()
    part = calls.slots(COMMITTED)
    before = calls.blocks
    part.generations[-1] += 1
    with pytest.raises(KVHearthError) as caught:
        calls.commit(part)
    assert caught.value.reason is Reason.STALE_EXTENT
    assert (calls.blocks, calls.reserved) == (before, COMMITTED)
    calls.engine.core.check_books()


def test_an_epoch_that_ends_a_commit_gives_the_rest_back() -> None:
    calls = Calls()
    part = calls.slots(COMMITTED)
    space = next(iter(calls.engine.core.state.namespaces))

    def bump() -> None:
        if space.epoch == calls.epoch:
            calls.engine.call(calls.engine.core.bump_namespace, space.digest)

    with pytest.raises(KVHearthError) as caught:
        calls.with_others(calls.commit(part), bump)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert calls.reserved == 0
    calls.engine.core.check_books()


def test_an_abort_in_the_middle_ends_a_commit() -> None:
    calls = Calls()
    part = calls.slots(COMMITTED)
    writing, number = calls.engine.core.writing, calls.session.number

    def abort() -> None:
        if calls.reserved == COMMITTED - BOUND_PER_TURN_MAX:
            last = SlotsItem(part.slots[-1], part.generations[-1])
            calls.engine.call(writing.abort, number, [last], [], in_doubt=False)

    with pytest.raises(KVHearthError) as caught:
        calls.with_others(calls.commit(part), abort)
    assert caught.value.reason is Reason.NOT_RESERVED
    assert calls.reserved == 0
    calls.engine.core.check_books()


def test_a_session_that_leaves_in_the_middle_ends_a_commit() -> None:
    calls = Calls()
    part = calls.slots(COMMITTED)

    def leave() -> None:
        calls.engine.leave(calls.session, finished=True)

    with pytest.raises(KVHearthError) as caught:
        calls.with_others(calls.commit(part), leave)
    assert caught.value.reason is Reason.GROUP_GONE
    assert calls.reserved == 0
    calls.engine.core.check_books()


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(-1, 30),
)
@no_deadline
def test_portions_of_any_size_bind_what_one_piece_binds(
    items: list[list[int]], portion: int, parent: int
) -> None:
    pictures = []
    for size in (portion, 1000):
        rig = Rig(2, slab_bytes=16 * 4096)
        session = rig.attach(contract())
        rig.put(session, keys(3, 4, 5))
        made = []
        for number, named in enumerate(items):
            if not named:
                continue
            (part,) = rig.reserve(session, len(named), 0).handed
            granted = keys(*named[: len(part.slots)])  # the last one may fall short
            before = key(parent) if parent >= 0 and not number else b""
            made.append(rig.item(granted, part.slots, part.generations, parent=before, summed=True))
        commit = rig.core.writing.begin_commit(session, rig.epoch(session), made)
        while commit.unfinished:
            commit.bind_some(size)
        rig.core.check_books()
        links = {
            each: rig.state.chains.parent_of(rig.head(session, key(each)))
            for each in range(31)
            if rig.head(session, key(each)) >= 0
        }
        found = [rig.head(session, key(each)) for each in range(31)]
        pictures.append(([flags.tolist() for flags in commit.stored], found, links))
    assert pictures[0] == pictures[1]
