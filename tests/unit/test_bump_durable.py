"""A bump of the epoch is confirmed once no directory can bring the old epoch back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.core_kit import contract, refused
from support.core_shell import Shell

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.transport.dispatch import Dispatcher


class Scripted:
    """The arena's catalogue, or the drives' one: it is durable once the test says so."""

    def __init__(self) -> None:
        self.paths = [Path("drive")]
        self.changes = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def changed(self) -> None:
        """Note that the content changed."""
        self.changes += 1

    async def written(self) -> None:
        """Wait until the test says so."""
        await asyncio.shield(self.ended)

    confirm = written


class Bump:
    """An engine's bump of its epoch, under way; ``old`` is the epoch before."""

    def __init__(self, *, only_alone: bool = False) -> None:
        geometry = Geometry.of([("t", 1 << 20)], 1 << 16, 4096)
        engine: Any = (shell := Shell(geometry, Limits())).engine
        attached = shell.attach(contract(), "t", scheduler=True)
        self.old = attached.welcome.epoch
        self.arena, self.drives = Scripted(), Scripted()
        engine.catalogue, engine.ssd_catalogue = self.arena, self.drives
        dispatcher = Dispatcher(engine, None)  # type: ignore[arg-type]
        request = pb.BumpEpochRequest(expected_epoch=self.old, only_alone=only_alone)
        reply = dispatcher.decide("BumpEpoch", request, attached.session)
        assert isinstance(reply, Awaitable), "confirmed at once"
        assert self.arena.changes == 1
        self.answer = asyncio.ensure_future(reply)

    async def is_confirmed(self) -> bool:
        """Whether there is an answer after all that can run has run."""
        for _ in range(8):
            await asyncio.sleep(0)
        return self.answer.done()


Of = Callable[[Bump], Scripted]


def arena(bump: Bump) -> Scripted:
    """The arena's catalogue."""
    return bump.arena


def drives(bump: Bump) -> Scripted:
    """The drives' catalogue."""
    return bump.drives


@pytest.mark.parametrize(("first", "last"), [(arena, drives), (drives, arena)])
def test_a_bump_waits_for_the_arena_and_the_drives(first: Of, last: Of) -> None:
    async def scenario() -> None:
        bump = Bump()
        assert not await bump.is_confirmed()
        first(bump).ended.set_result(None)
        assert not await bump.is_confirmed()
        last(bump).ended.set_result(None)
        assert (await bump.answer).epoch == bump.old + 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("bad", "good", "reason"),
    [(arena, drives, Reason.ARENA_UNUSABLE), (drives, arena, Reason.SSD_UNUSABLE)],
)
def test_a_bump_that_cannot_be_durable_is_not_confirmed(bad: Of, good: Of, reason: Reason) -> None:
    async def scenario() -> None:
        bump = Bump()
        bad(bump).ended.set_exception(KVHearthError(reason, "planted"))
        good(bump).ended.set_result(None)
        with refused(reason):
            await bump.answer

    asyncio.run(scenario())


def test_a_bump_of_an_engine_alone_waits_for_the_arena_only() -> None:
    async def scenario() -> None:
        bump = Bump(only_alone=True)
        assert not await bump.is_confirmed()
        bump.arena.ended.set_result(None)
        assert (await bump.answer).epoch == bump.old + 1

    asyncio.run(scenario())
