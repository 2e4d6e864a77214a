"""A tier and a shared one behind it that act as one: where a load reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drive import Drive
from support.fake_tier import FakeTier
from support.tiers import Arena, Desk, family, keys_of

from kvhearth_server.tiers.base import (
    Corrupt,
    Done,
    Evicted,
    Failed,
    Missing,
    Outcome,
    Throttled,
)
from kvhearth_server.tiers.chain import TierChain


class SharedTier(FakeTier):
    """One that other daemons use, too."""

    shared = True  # type: ignore[assignment]


class Rig:
    """Two tiers, the chain of both, and a desk for each."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.upper = FakeTier([self.arena.bytes], 1 << 20, batch_blocks_max=64)
        self.lower = SharedTier([self.arena.bytes], 1 << 20, batch_blocks_max=64)
        self.chain = TierChain([self.upper, self.lower])
        # Without a drive of their own, the tiers do all of it when they are polled.
        self.desk = Desk(self.chain, self.arena, Drive())
        self.into_lower = Desk(self.lower, self.arena, Drive())

    def have(self, upper: list[int], lower: list[int]) -> None:
        """Put blocks into the tiers."""
        self.desk.store_all(upper)
        self.into_lower.store_all(lower)
        self.upper.submitted.clear()
        self.lower.submitted.clear()

    def outcomes(self, numbers: list[int]) -> dict[Outcome, list[int]]:
        """Load blocks, compare the bytes that arrived, and return the outcomes."""
        parts = self.desk.load(numbers).parts
        return {what: sorted(numbers[row] for row in rows.tolist()) for what, rows in parts}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.chain.close()


def wrong(outcome: Outcome, *numbers: int) -> object:
    """Return what spoils the loads of some blocks."""
    keys = keys_of(list(numbers))
    return lambda load, key: outcome if load and key in keys else None


def test_each_block_is_read_from_the_first_tier_that_has_it(rig: Rig) -> None:
    rig.have([1, 2, 3], [3, 4, 5])
    assert rig.outcomes([5, 1, 9, 3]) == {Done(): [1, 3, 5], Missing(): [9]}
    assert rig.lower.submitted["load"] == 1


@pytest.mark.parametrize("outcome", [Corrupt("tier"), Failed("io"), Missing()])
def test_a_failed_read_falls_to_the_next_tier(rig: Rig, outcome: Outcome) -> None:
    rig.have([1, 2], [1])
    rig.upper.spoil = wrong(outcome, 1, 2)
    assert rig.outcomes([1, 2]) == {Done(): [1], outcome: [2]}
    hidden = [Evicted(family().namespace, 0, keys_of([1]), "checksum")]
    assert rig.chain.take_evicted() == (hidden if outcome == Corrupt("tier") else [])


def test_the_first_failure_stands_where_all_tiers_fail(rig: Rig) -> None:
    rig.have([1], [1])
    rig.upper.spoil, rig.lower.spoil = wrong(Failed("io"), 1), wrong(Corrupt("tier"), 1)
    assert rig.outcomes([1]) == {Failed("io"): [1]}


def test_a_tier_that_refuses_is_passed_over(rig: Rig) -> None:
    rig.have([1, 2], [2])
    rig.upper.refuse_loads = Throttled("degraded", 1.0)
    assert rig.outcomes([1, 2]) == {Done(): [2], Throttled("degraded", 1.0): [1]}
    batch = rig.desk.load_batch([1], family())
    assert rig.chain.submit_load(batch) == Throttled("degraded", 1.0)


def test_a_cancelled_load_reads_from_no_other_tier(rig: Rig) -> None:
    rig.have([1], [1])
    rig.upper.held = True
    ticket = rig.chain.submit_load(rig.desk.load_batch([1], family()))
    assert isinstance(ticket, int)
    rig.chain.cancel(ticket)
    rig.upper.held = False
    assert rig.desk.wait(ticket).parts[0][0] == Failed("cancelled")
    assert rig.lower.submitted["load"] == 0


def test_a_stuck_tier_is_told_of_and_the_slots_stay_lent(rig: Rig) -> None:
    rig.have([1, 2], [2, 3])
    rig.lower.held = True
    ticket = rig.chain.submit_load(rig.desk.load_batch([3, 1], family()))
    rig.lower.stuck()
    (notice,) = rig.chain.poll()
    assert (notice.ticket, notice.final) == (ticket, False)
    assert notice.rows(Failed).tolist() == [0]
    rig.lower.held = False
    assert len(rig.desk.wait(ticket).rows(Done)) == 2
