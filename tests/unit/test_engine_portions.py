"""Long calls yield the loop to other tasks, and stay correct whatever those do meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import SLOT_BYTES, Rig, contract, key, keys, no_deadline, refused, sums_of
from support.core_shell import Desk

from kvhearth.errors import Reason
from kvhearth.model import EXTENT_DTYPE, unpack_bits
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth_server.core.groups import SlotGrant
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import State
from kvhearth_server.engine.checksums import ChecksumWorkers
from kvhearth_server.engine.operations import EVICTED_MAX, Removed, check_books, evict
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.transport.dispatch import BOUND_PER_TURN_MAX, EVICTED_PER_TURN_MAX

BLOCKS = 2048
COMMITTED = 3 * BOUND_PER_TURN_MAX + 5

T = TypeVar("T")


def meanwhile(
    work: Callable[[], Awaitable[T]], other: Callable[[int], None] = lambda _: None
) -> tuple[T, int]:
    """Run ``work`` beside another task that runs whenever the loop has a turn for it. Return the
    number of its turns while the work lasted.
    """

    async def main() -> tuple[T, int]:
        task = asyncio.ensure_future(work())
        turns = 0
        await asyncio.sleep(0)
        while not task.done():
            other(turns)
            turns += 1
            await asyncio.sleep(0)
        return await task, turns

    return asyncio.run(asyncio.wait_for(main(), 60))


class World:
    """An engine with a namespace of ``blocks``, which fill the arena if there are ``BLOCKS``."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.desk = Desk(BLOCKS // 16, namespaces_max=1)
        self.core, self.engine = self.desk.core, self.desk.engine
        self.session = self.desk.attach()
        self.space, self.stored = self.desk.space(self.session), 0
        if blocks:
            self.store(blocks)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.space.blocks

    @property
    def reserved(self) -> int:
        """Number of reserved slots."""
        return self.desk.slots_in(State.RESERVED)

    def store(self, count: int) -> None:
        """Store ``count`` new blocks."""
        named = keys(*range(self.stored, self.stored + count))
        assert self.desk.put(self.session, named).all()
        self.stored += count

    def evict(self, keep: int = 0) -> Awaitable[Removed]:
        """Evict the namespace but for some of its blocks."""
        return evict(self.engine, self.space.digest, keep * SLOT_BYTES)

    def bump(self) -> None:
        """Bump the epoch, for an operator."""
        self.engine.call(self.core.bump_namespace, self.space.digest)

    def reserve(self, count: int) -> Any:
        """Return the reply, or an awaitable of it."""
        groups = [types_pb2.GroupCount(group=0, count=count)]
        request = cache_pb2.ReserveRequest(
            reservation_id=1 << 40, epoch=self.space.epoch, groups=groups
        )
        return self.desk.ask(self.session, "Reserve", request)

    def commit(self, part: SlotGrant) -> Any:
        """Return the reply, or an awaitable of it, to a commit of new keys."""
        count = len(part.slots)
        named = cache_pb2.GroupCommit(
            group=0,
            keys=b"".join(keys(*range(BLOCKS, BLOCKS + count))),
            slots=part.slots.astype("<u4").tobytes(),
            generations=part.generations.astype("<u4").tobytes(),
            checksums=sums_of(part.slots).tobytes(),
        )
        request = cache_pb2.CommitRequest(epoch=self.space.epoch, groups=[named])
        return self.desk.ask(self.session, "Commit", request)

    def slots(self, count: int) -> SlotGrant:
        """Reserve in one piece."""
        (part,) = self.desk.reserve(self.session, count).handed
        return part


# -- operators -------------------------------------------------------------------------------------


def test_eviction_is_cut_into_portions() -> None:
    world = World()
    seen = [BLOCKS]
    done, turns = meanwhile(lambda: world.evict(100), lambda _: seen.append(world.blocks))
    assert (done.memory, world.blocks) == (BLOCKS - 100, 100)
    assert turns >= BLOCKS // EVICTED_MAX - 1
    assert max(before - after for before, after in itertools.pairwise(seen)) <= EVICTED_MAX
    world.desk.check()
    assert meanwhile(world.evict)[0].memory == 100
    assert meanwhile(world.evict)[0] == Removed()  # at once


def test_stores_that_arrive_meanwhile_do_not_keep_an_eviction_going() -> None:
    world = World(300)
    done, _ = meanwhile(world.evict, lambda turn: world.store(100) if turn < 10 else None)
    assert done.memory == 300


def test_blocks_with_wrong_bytes_are_removed_in_portions() -> None:
    """Any client can commit blocks whose bytes do not match their checksums."""
    world = World(1024)
    state, seen = world.core.state, [1024]
    (heads,) = (found for _, _, found in state.index.spaces())
    background = ChecksumWorkers(world.engine, Supervisor(Counters(COUNTERS)), sum_threads=1)
    removed, _ = meanwhile(
        lambda: background.verify_blocks(state.table.blocks_of(heads)),
        lambda _: seen.append(world.blocks),
    )
    background.close()
    assert (removed, world.blocks) == (1024, 0)
    assert max(before - after for before, after in itertools.pairwise([*seen, 0])) <= 256
    world.desk.check()


def test_a_namespace_that_goes_meanwhile_ends_an_eviction() -> None:
    """Another operator was faster, and an engine with another contract took its place."""
    world = World()
    world.engine.leave(world.desk.attached[world.session].session, finished=True)

    def replace(turn: int) -> None:
        if turn == 0:
            world.engine.call(world.core.evict, world.space.digest, 0)
            world.desk.attach(contract(revision="other"), engine_id="other")

    done, _ = meanwhile(world.evict, replace)
    assert done.memory == EVICTED_MAX
    with refused(Reason.UNKNOWN_NAMESPACE):
        meanwhile(world.evict)


def test_books_are_counted_in_portions_while_others_write() -> None:
    world = World()

    def store(turn: int) -> None:
        world.store(1 + turn % 3)
        if turn % 4 == 0:
            world.engine.call(world.core.evict, world.space.digest, 0, 5)

    said, turns = meanwhile(lambda: check_books(world.engine), store)
    assert said == ""
    assert turns >= 10


def test_books_that_do_not_balance_are_told() -> None:
    world = World(10)
    world.space.blocks += 1
    said, _ = meanwhile(lambda: check_books(world.engine))
    assert said == "namespace 1 blocks: counted 10, booked 11"


# -- reservations ----------------------------------------------------------------------------------


def test_others_have_their_turn_while_a_reservation_evicts() -> None:
    world = World()
    seen = [world.blocks]
    reply, _ = meanwhile(lambda: world.reserve(BLOCKS), lambda _: seen.append(world.blocks))
    (part,) = reply.groups
    assert len(np.unique(np.frombuffer(part.extents, EXTENT_DTYPE)["slot"])) == BLOCKS
    assert part.count == BLOCKS
    assert reply.short_reason == ""
    steps = -np.diff([*seen, world.blocks])
    assert steps.sum() == BLOCKS
    assert steps.max() <= EVICTED_PER_TURN_MAX


def test_small_calls_are_answered_at_once() -> None:
    world = World()
    reply = world.reserve(EVICTED_PER_TURN_MAX)
    assert not isawaitable(reply)
    assert reply.groups[0].count == EVICTED_PER_TURN_MAX
    reply = world.commit(world.slots(BOUND_PER_TURN_MAX))
    assert not isawaitable(reply)
    assert unpack_bits(reply.stored[0].bits, BOUND_PER_TURN_MAX).all()


def test_an_epoch_that_ends_a_reservation_gives_its_slots_back() -> None:
    world = World()
    epoch = world.space.epoch

    def bump(_: int) -> None:
        if world.space.epoch == epoch and world.blocks < BLOCKS - EVICTED_PER_TURN_MAX:
            world.bump()

    with refused(Reason.STALE_EPOCH):
        meanwhile(lambda: world.reserve(BLOCKS), bump)
    assert world.reserved == 0
    assert 0 < world.blocks < BLOCKS
    world.desk.check()


# -- commits ---------------------------------------------------------------------------------------


def test_others_have_their_turn_while_a_commit_binds() -> None:
    world = World()
    part, seen = world.slots(COMMITTED), [BLOCKS - COMMITTED]
    reply, _ = meanwhile(lambda: world.commit(part), lambda _: seen.append(world.blocks))
    assert unpack_bits(reply.stored[0].bits, COMMITTED).all()
    steps = np.diff([*seen, world.blocks])
    assert steps.sum() == COMMITTED
    assert steps.max() <= BOUND_PER_TURN_MAX
    index, chains = world.core.state.index, world.core.state.chains
    heads = index.find(world.space.number, 0, keys(*range(BLOCKS, BLOCKS + COMMITTED)))
    assert heads.tolist() == part.slots[:, 0].tolist()
    parents = [chains.parent_of(head) for head in heads[1:].tolist()]
    assert parents == heads[:-1].tolist()
    world.desk.check()


def test_a_large_commit_with_one_bad_slot_binds_nothing() -> None:
    world = World()
    part = world.slots(COMMITTED)
    part.generations[-1] += 1
    with refused(Reason.STALE_EXTENT):
        world.commit(part)
    assert (world.blocks, world.reserved) == (BLOCKS - COMMITTED, COMMITTED)
    world.desk.check()


@pytest.mark.parametrize("end", ["epoch", "abort", "leave"])
def test_an_end_in_the_middle_of_a_commit_gives_the_rest_back(end: str) -> None:
    world = World()
    part, session, epoch = world.slots(COMMITTED), world.session, world.space.epoch
    reason = {"epoch": Reason.STALE_EPOCH, "abort": Reason.NOT_RESERVED, "leave": Reason.GROUP_GONE}

    def other(turn: int) -> None:
        if end == "epoch" and world.space.epoch == epoch:
            world.bump()
        elif end == "abort" and world.reserved == COMMITTED - BOUND_PER_TURN_MAX:
            last = SlotsItem(part.slots[-1], part.generations[-1])
            world.engine.call(world.core.writing.abort, session, [last], [], in_doubt=False)
        elif end == "leave" and not turn:
            world.engine.leave(world.desk.attached[session].session, finished=True)

    with refused(reason[end]):
        meanwhile(lambda: world.commit(part), other)
    assert world.reserved == 0
    world.desk.check()


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
            made.append(rig.item(granted, part.slots, part.generations, parent=before))
        commit = rig.core.writing.begin_commit(session, rig.epoch(session), made)
        while commit.unfinished:
            commit.bind_some(size)
        rig.check()
        found = [rig.head(session, key(each)) for each in range(31)]
        links = [rig.state.chains.parent_of(head) for head in found if head >= 0]
        pictures.append(([flags.tolist() for flags in commit.stored], found, links))
    assert pictures[0] == pictures[1]
