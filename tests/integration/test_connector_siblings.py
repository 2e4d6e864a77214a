"""Requests whose KV another cache of the engine loads: only written blocks are stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.daemon import running_daemon
from support.scripted_engine import BLOCK_TOKENS, ScriptedEngine, scripted_engine
from support.scripted_world import STOCK_BLOCKS, World

TOKENS = 6 * BLOCK_TOKENS + 3
BLOCKS = TOKENS // BLOCK_TOKENS
FULL = -1
"""The number for a store that takes all the room."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    pool_tokens = STOCK_BLOCKS * BLOCK_TOKENS
    with (
        running_daemon() as daemon,
        scripted_engine(daemon.url(), pool_tokens=pool_tokens, held_percent=100) as found,
    ):
        yield found


@pytest.fixture(params=[0, 1], ids=["steps one by one", "steps ahead"])
def world(engine: ScriptedEngine, request: pytest.FixtureRequest) -> World:
    """A world whose sibling has every test's whole text."""
    found = World(engine, sibling_first=True, lag=request.param)
    found.text = request.node.name
    found.sibling_has[found.text] = TOKENS
    return found


def began(world: World, *, generated: int = 1, sync: bool = False, fails: bool = False) -> None:
    """Admits the request ``a`` with a load by the sibling."""
    world.add("a", world.text, TOKENS, generated)
    assert world.admit("a", 1, fails=fails, sync=sync)


def stored(world: World) -> int:
    """Ends the remaining requests and loads the text; returns the number of stored blocks, all
    right.
    """
    return world.close([world.text], TOKENS)


def test_aborted_while_the_sibling_loads(world: World) -> None:
    began(world)
    world.abort("a")
    assert stored(world) == 0


def test_aborted_after_the_siblings_load(world: World) -> None:
    began(world)
    world.sibling_done("a")
    world.abort("a")
    assert stored(world) == 0, "nothing says that the blocks are right until a step follows"


def test_finished(world: World) -> None:
    """All blocks loaded by the sibling are stored once the request is computed further."""
    began(world)
    world.sibling_done("a")
    world.resume("a")
    world.step({})
    assert stored(world) == BLOCKS
    assert world.sibling_stored == BLOCKS


@pytest.mark.parametrize("failure", ["request", "blocks"])
def test_a_load_of_the_sibling_fails(world: World, failure: str) -> None:
    began(world, generated=2)
    world.sibling_done("a", failure, blocks=2)
    if failure == "request":
        world.sibling_has.clear()
        assert world.admit("a", TOKENS, fails=False, sync=False), "the engine computes it"
    else:
        world.resume("a")
    world.step({})
    assert stored(world) == BLOCKS


@pytest.mark.parametrize("failure", ["request", "blocks"])
def test_aborted_after_a_failure(world: World, failure: str) -> None:
    began(world)
    world.sibling_done("a", failure, blocks=2)
    world.abort("a")
    assert stored(world) == 0


def test_preempted_and_loaded_again(world: World) -> None:
    """The second admission gets other blocks, which hold nothing yet."""
    holds, blocks = world.engine.half._block_refs, world.engine.pool.page_count
    holds.hold(FULL, [1] * blocks)  # no room: nothing is stored before the preemption
    began(world, generated=20, sync=True)
    world.step({"a": TOKENS})
    world.step({})
    holds.release(FULL)
    world.preempt("a")
    world.reset()
    assert world.admit("a", 1, fails=False, sync=False)
    assert world.live["a"].status == "sibling"
    world.abort("a")
    assert stored(world) == 0


def test_a_load_within_the_step_fails(world: World) -> None:
    """Blocks computed in that step are not committed, and the engine computes them again."""
    began(world, generated=20, sync=True, fails=True)
    world.step({})
    world.abort("a")
    assert stored(world) == 0


def test_a_load_within_the_step(world: World) -> None:
    began(world, generated=2, sync=True)
    world.step({})
    world.step({"a": TOKENS})
    world.step({})
    assert stored(world) == BLOCKS


def test_a_failure_of_the_sibling_costs_no_hit_of_ours(world: World) -> None:
    world.sibling_has.clear()
    world.add("b", world.text, TOKENS, 1)
    assert world.admit("b", TOKENS, fails=False, sync=False)
    world.step({})
    world.engine.settle()
    world.reset()
    world.sibling_has[world.text] = TOKENS
    began(world)
    assert world.live["a"].status == "sibling"
    world.sibling_done("a", "request")
    world.sibling_has.clear()
    assert world.admit("a", TOKENS, fails=False, sync=False)
    assert world.live["a"].status == "ours"
    assert stored(world) == BLOCKS
