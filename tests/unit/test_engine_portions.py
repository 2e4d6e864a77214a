"""Long work yields the loop to other tasks, and stays correct whatever they do meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from support.core_kit import contract, keys, sums_of
from support.core_shell import Shell

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.commit import CommitItem
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.engine.checksums import ChecksumWorkers
from kvhearth_server.engine.operations import EVICTED_MAX, Removed, check_books, evict
from kvhearth_server.engine.supervisor import Supervisor
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS

PAGE = 4096
SLABS = 160
GEOMETRY = Geometry.of([("t", SLABS * 64 * 1024)], 64 * 1024, PAGE)
LIMITS = Limits(held_fraction_max=1.0, stock_fraction_max=1.0, namespaces_max=1)
BLOCKS = 16 * EVICTED_MAX

T = TypeVar("T")


class World:
    """An engine with a full namespace."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.shell = Shell(GEOMETRY, LIMITS)
        self.engine = self.shell.engine
        self.session = self.shell.attach(contract(), "t").session
        self.space = next(iter(self.engine.core.state.namespaces))
        self.stored = 0
        if blocks:
            self.store(blocks)

    def store(self, count: int) -> None:
        """Stores ``count`` new blocks."""
        engine, writing, number = self.engine, self.engine.core.writing, self.session.number
        epoch = self.space.epoch
        (part,) = engine.call(writing.reserve, number, self.stored + 1, epoch, [(0, count)]).handed
        named = keys(*range(self.stored, self.stored + count))
        item = CommitItem(0, named, part.slots, part.generations, sums_of(part.slots), b"")
        engine.call(writing.commit, number, epoch, [item])
        self.stored += count


def meanwhile(work: Callable[[], Awaitable[T]], other: Callable[[int], None]) -> tuple[T, int]:
    """Runs ``work`` beside another task that runs whenever the loop has a turn for it; returns the
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


def nothing(_: int) -> None:
    """The other task only waits."""


def test_eviction_is_cut_into_portions() -> None:
    world = World()
    seen: list[int] = []
    done, turns = meanwhile(
        lambda: evict(world.engine, world.space.digest, 100 * PAGE),
        lambda _: seen.append(world.space.blocks),
    )
    assert (done.memory, world.space.blocks) == (BLOCKS - 100, 100)
    assert turns >= BLOCKS // EVICTED_MAX - 1
    steps = [before - after for before, after in zip([BLOCKS, *seen], seen, strict=False)]
    assert max(steps) <= EVICTED_MAX
    world.engine.core.check_books()


def test_blocks_with_wrong_bytes_are_removed_in_portions() -> None:
    """Any client can commit blocks whose bytes do not match their checksums."""
    world = World(1024)
    core, seen = world.engine.core, [world.space.blocks]
    (heads,) = (found for _, _, found in core.state.index.spaces())
    background = ChecksumWorkers(world.engine, Supervisor(Counters(COUNTERS)), sum_threads=1)
    removed, _ = meanwhile(
        lambda: background.verify_blocks(core.state.table.blocks_of(heads)),
        lambda _: seen.append(world.space.blocks),
    )
    background.close()
    seen.append(world.space.blocks)
    assert (removed, seen[-1]) == (1024, 0)
    steps = [before - after for before, after in itertools.pairwise(seen)]
    assert max(steps) <= 256
    core.check_books()


def test_a_namespace_that_goes_meanwhile_ends_an_eviction() -> None:
    """Another operator was faster, and an engine with another contract took its place."""
    world = World()
    world.engine.leave(world.session, finished=True)
    digest = world.space.digest

    def replace(turn: int) -> None:
        if turn == 0:
            world.engine.call(world.engine.core.evict, digest, 0)
            world.shell.attach(contract(revision="other"), "t", engine_id="other")

    done, _ = meanwhile(lambda: evict(world.engine, digest, 0), replace)
    assert done.memory == EVICTED_MAX
    with pytest.raises(KVHearthError) as caught:
        meanwhile(lambda: evict(world.engine, digest, 0), nothing)
    assert caught.value.reason is Reason.UNKNOWN_NAMESPACE


def test_an_empty_namespace_is_evicted_at_once() -> None:
    world = World(0)
    assert meanwhile(lambda: evict(world.engine, world.space.digest, 0), nothing)[0] == Removed()


def test_books_are_counted_in_portions_while_others_write() -> None:
    world = World()

    def store(turn: int) -> None:
        world.store(1 + turn % 3)
        if turn % 4 == 0:
            world.engine.call(world.engine.core.evict, world.space.digest, 0, 5)

    said, turns = meanwhile(lambda: check_books(world.engine), store)
    assert said == ""
    assert turns >= 10


def test_books_that_do_not_balance_are_told() -> None:
    world = World(10)
    world.space.blocks += 1
    said, _ = meanwhile(lambda: check_books(world.engine), nothing)
    assert said == "namespace 1 blocks: counted 10, booked 11"
