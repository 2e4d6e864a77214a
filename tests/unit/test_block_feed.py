"""What an engine publishes of the daemon's blocks, as reads of their events succeed and fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from support.scripted_clock import ScriptedClock, scripted_clock

from kvhearth.client import KVClient
from kvhearth.connectors.core.block_feed import (
    AWAY_S,
    TAKEN_MAX,
    WAITING_MAX,
    BlockChange,
    BlockFeed,
    KnownBlocks,
)
from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth.results import BlockEvent, BlockTokens, EventsResult
from kvhearth_lab.harness import HUNG_S

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
NOWHERE, DRAM, SSD = Tier.NOWHERE, Tier.DRAM, Tier.SSD


def events(*told: tuple[bytes, Tier], cursor: str = "x", **more: Any) -> EventsResult:
    """Return a result with an event for each block."""
    found = [BlockEvent("any", 0, [key], tier, "") for key, tier in told]
    return EventsResult(found, cursor, **more)


class ScriptedClient:
    """Answers reads as they were scripted, then with nothing new."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock = clock
        self.session_id = "session"
        self.answers: list[EventsResult] = []
        self.asked: list[str] = []
        self.counted = 0

    def events(self, cursor: str, *, tokens: bool) -> EventsResult:
        """Answer a read."""
        assert tokens
        self.asked.append(cursor)
        return self.answers.pop(0) if self.answers else EventsResult(cursor=cursor or "x")

    def count(self, name: str, amount: int) -> None:
        """Count what was left out."""
        assert name == "events_left_out"
        self.counted += amount


class Rig:
    """A feed of a scripted client."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock, self.client = clock, ScriptedClient(clock)
        self.feed = BlockFeed(cast(KVClient, self.client), tokens=True)
        self.woken = 0
        self.feed.wake = self._wake

    def _wake(self) -> None:
        self.woken += 1

    def read(self, *answers: EventsResult) -> list[BlockChange]:
        """Let the feed read these answers; return what it tells then."""
        self.client.answers += answers
        before = len(self.client.asked)
        self.clock.until(lambda: not self.client.answers and len(self.client.asked) > before)
        self.clock.pass_time(0.3)
        return self.feed.take()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with scripted_clock() as clock:
        rig = Rig(clock)
        yield rig
        assert rig.feed.close(HUNG_S)


def test_what_changed_is_told_once_with_what_it_holds(rig: Rig) -> None:
    holds = BlockTokens(b"", (1, 2))
    hidden = {(0, C): None}
    told = rig.read(events((A, DRAM), (B, SSD), (C, DRAM), tokens={(0, A): holds, **hidden}))
    assert told == [BlockChange(0, A, NOWHERE, DRAM, holds), BlockChange(0, B, NOWHERE, SSD)]
    assert rig.woken
    assert rig.read(events((A, SSD), (A, DRAM), (C, SSD), (C, NOWHERE), tokens=hidden)) == []
    told = rig.read(events((A, SSD), tokens={(0, A): holds}), events((A, SSD)))
    assert told == [BlockChange(0, A, DRAM, SSD, holds)]
    assert rig.read(events((A, NOWHERE))) == [BlockChange(0, A, SSD, NOWHERE)]
    assert rig.read(events((A, DRAM))) == [BlockChange(0, A, NOWHERE, DRAM)]


def test_after_another_boot_only_the_difference_is_told(rig: Rig) -> None:
    rig.read(events((A, DRAM), (B, DRAM)))
    stale = EventsResult(cursor="x", reason=Reason.STALE_BOOT)
    told = rig.read(stale, events((B, SSD), listing=True), events((C, DRAM)))
    assert rig.client.asked.count("") == 2, "it begins anew"
    assert told == [
        BlockChange(0, B, DRAM, SSD),
        BlockChange(0, C, NOWHERE, DRAM),
        BlockChange(0, A, DRAM, NOWHERE),
    ]


@pytest.mark.parametrize("why", ["stale_epoch", "away"])
def test_blocks_that_cannot_be_loaded_any_more_are_gone(rig: Rig, why: str) -> None:
    rig.read(events((A, DRAM)))
    if why == "away":
        rig.client.session_id = ""
        rig.clock.pass_time(AWAY_S - 0.5)
        assert rig.feed.take() == []
        rig.clock.pass_time(1.0)
        assert rig.feed.take() == [BlockChange(0, A, DRAM, NOWHERE)]
        rig.client.session_id = "next"
    else:
        refusal = EventsResult(cursor="x", reason=Reason.STALE_EPOCH)
        assert rig.read(refusal) == [BlockChange(0, A, DRAM, NOWHERE)]
    assert rig.read(events((B, DRAM))) == [BlockChange(0, B, NOWHERE, DRAM)]
    assert "" in rig.client.asked[1:]


def test_a_read_that_fails_changes_nothing(rig: Rig) -> None:
    rig.read(events((A, DRAM)))
    assert rig.read(EventsResult(cursor="x", reason=Reason.DEADLINE)) == []
    assert rig.read(events((A, NOWHERE))) == [BlockChange(0, A, DRAM, NOWHERE)]


def test_those_who_forgot_all_are_told_again(rig: Rig) -> None:
    rig.read(events((A, DRAM), (B, DRAM)))
    rig.feed.tell_again()
    assert rig.feed.take() == []
    holds = BlockTokens(B, (1, 2))
    told = rig.read(events((A, DRAM), tokens={(0, A): holds}))
    assert told == [BlockChange(0, A, NOWHERE, DRAM, holds)]
    assert rig.client.asked.count("") == 2, "it begins anew"


def test_no_more_is_read_than_can_be_published_soon(rig: Rig) -> None:
    keys = [number.to_bytes(32, "big") for number in range(WAITING_MAX + TAKEN_MAX)]
    assert len(rig.read(events(*((key, DRAM) for key in keys)))) == TAKEN_MAX
    asked = len(rig.client.asked)
    rig.clock.pass_time(1.0)
    assert len(rig.client.asked) == asked
    assert len(rig.feed.take()) == TAKEN_MAX
    rig.clock.pass_time(1.0)
    assert len(rig.client.asked) > asked


def test_a_step_publishes_only_so_many() -> None:
    known = KnownBlocks()
    keys = [number.to_bytes(32) for number in range(TAKEN_MAX + 1)]
    known.apply(events(*((key, DRAM) for key in keys)))
    assert [len(known.take()), known.waiting, len(known.take()), known.waiting] == [
        *(TAKEN_MAX, 1),
        *(1, 0),
    ]


def test_the_blocks_known_are_bounded() -> None:
    known = KnownBlocks(blocks_max=2)
    known.apply(events((A, DRAM), (B, DRAM), (C, DRAM)))
    assert [change.key for change in known.take()] == [A, B]
    assert known.left_out == 1
    known.apply(events((A, NOWHERE), (C, DRAM)))
    assert [change.key for change in known.take()] == [A, C]


def test_a_list_of_any_length_is_applied_in_parts() -> None:
    """What it has not told yet makes room for what it tells, and comes back when it is told."""
    known = KnownBlocks(blocks_max=2)
    known.apply(events((A, DRAM), (B, DRAM)))
    told = known.take()
    for number, key in enumerate((C, B, *(bytes([each]) * 32 for each in range(200, 250)))):
        known.apply(events((key, DRAM), lost=number == 0, listing=number < 51))
        told += known.take()
        assert len(known._tiers) <= 2
    assert known.left_out == 50
    there = {change.key: change.now for change in told}
    assert there == {A: NOWHERE, B: DRAM, C: DRAM}
    assert not known._unlisted
