"""A large reservation from a full daemon yields the loop to other tasks, and leaks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import numpy as np
import pytest
from support.core_kit import contract, keys, sums_of
from support.core_shell import Shell

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.core.state import Limits
from kvhearth_server.transport.dispatch import EVICTED_PER_TURN_MAX, Decisions

BLOCKS = 2048


class Desk:
    """A full engine and a session that makes reservations."""

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
        self.decisions = Decisions(self.engine, None)  # type: ignore[arg-type]

    @property
    def blocks(self) -> int:
        """Number of blocks left."""
        return next(iter(self.engine.core.state.namespaces)).blocks

    def reserve(self, count: int) -> Any:
        """Returns the reply, or an awaitable of it."""
        group = types_pb2.GroupCount(group=0, count=count)
        request = cache_pb2.ReserveRequest(reservation_id=2, epoch=self.epoch, groups=[group])
        return self.decisions.decide("Reserve", request, self.session)

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
    desk = Desk()
    seen = [desk.blocks]
    reply = desk.with_others(desk.reserve(BLOCKS), lambda: seen.append(desk.blocks))
    (part,) = reply.groups
    assert len(np.unique(np.frombuffer(part.extents, EXTENT_DTYPE)["slot"])) == BLOCKS
    assert part.count == BLOCKS
    assert reply.short_reason == ""
    steps = -np.diff([*seen, desk.blocks])
    assert steps.sum() == BLOCKS
    assert steps.max() <= EVICTED_PER_TURN_MAX


def test_a_small_one_is_answered_at_once() -> None:
    desk = Desk()
    reply = desk.reserve(EVICTED_PER_TURN_MAX)
    assert not isawaitable(reply)
    assert reply.groups[0].count == EVICTED_PER_TURN_MAX


def test_what_ends_it_in_between_gives_its_slots_back() -> None:
    desk = Desk()

    def bump() -> None:
        space = next(iter(desk.engine.core.state.namespaces))
        if space.epoch == desk.epoch and desk.blocks < BLOCKS - EVICTED_PER_TURN_MAX:
            desk.engine.call(desk.engine.core.bump_namespace, space.digest)

    with pytest.raises(KVHearthError) as caught:
        desk.with_others(desk.reserve(BLOCKS), bump)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert not (desk.engine.core.state.table.state == State.RESERVED).any()
    assert 0 < desk.blocks < BLOCKS
    desk.engine.core.check_books()
