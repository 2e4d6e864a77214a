"""A list of tiers that acts as one: where a load reads, and what is demoted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.core_kit import keys
from support.tier_rig import FakeTier, TierRig
from support.tiers import Arena, Desk, family, key_of, keys_of

from kvhearth_server.core.slot_table import CopyState
from kvhearth_server.tiers.base import (
    BlockSpec,
    Corrupt,
    Done,
    Evicted,
    Failed,
    Missing,
    Offer,
    Outcome,
    Throttled,
)
from kvhearth_server.tiers.chain import DEMOTION_S, PAUSE_S, TierChain, demotion_region

OLD = family(epoch=0)


class Rig:
    """Two tiers, the chain of both, and a desk for each."""

    def __init__(self) -> None:
        self.arena, region = Arena(), demotion_region()
        self.now = 0.0
        self.upper, self.lower = (
            FakeTier([self.arena.bytes, region], 1 << 20, batch_blocks_max=64) for _ in range(2)
        )
        self.chain = TierChain(
            [self.upper, self.lower], 1, lambda of: of.epoch > 0, lambda: self.now
        )
        self.desk = Desk(self.chain, self.arena)
        self.into_lower = Desk(self.lower, self.arena)

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

    def offer(self, numbers: list[int], of: BlockSpec | None = None) -> Offer:
        """Let the upper tier offer blocks, and run turns until the chain has nothing to do."""
        offer = Offer(of or family(), keys_of(numbers))
        self.upper.offers.append(offer)
        for _ in range(8):
            assert self.chain.poll() == []
        return offer

    def in_lower(self, numbers: list[int]) -> list[int]:
        """Return the blocks that the lower tier has."""
        present = self.lower.look_up(family(), keys_of(numbers)).present
        return [numbers[row] for row in np.flatnonzero(present).tolist()]


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


def test_a_copy_with_other_bytes_is_not_taken(rig: Rig) -> None:
    rig.have([1], [])
    batch = rig.desk.store_batch([2], family())
    other = type(batch)(
        family(), keys_of([1]), batch.places, batch.checksums, batch.sequences, batch.parents
    )
    rig.into_lower.wait(rig.lower.submit_store(other))
    rig.upper.spoil = wrong(Failed("io"), 1)
    assert rig.outcomes([1]) == {Failed("io"): [1]}
    assert rig.lower.submitted["load"] == 0


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


def test_what_a_tier_offers_is_demoted(rig: Rig) -> None:
    rig.have([1, 2, 3], [2])
    assert rig.offer([1, 2, 3, 9]).settled
    assert rig.in_lower([1, 2, 3]) == [1, 2, 3]
    assert rig.lower.submitted["store"] == 2
    assert rig.upper.counts["demoted_blocks"] == 2
    rig.upper.lose(keys_of([1, 2, 3]))
    assert rig.outcomes([1, 2, 3]) == {Done(): [1, 2, 3]}


def test_nothing_that_no_lookup_can_name_is_demoted(rig: Rig) -> None:
    rig.desk.store_all([1], OLD)
    assert rig.offer([1], OLD).settled
    assert rig.lower.submitted["store"] == 0


def test_a_block_larger_than_the_buffer_is_not_demoted(rig: Rig) -> None:
    assert rig.offer([1], family(length=64 << 20)).settled


def test_wrong_bytes_are_not_demoted_and_told(rig: Rig) -> None:
    rig.have([1, 2], [])
    rig.upper.damage(key_of(1))
    assert rig.offer([1, 2]).settled
    assert rig.in_lower([1, 2]) == [2]
    assert rig.chain.take_evicted() == [Evicted(family().namespace, 0, keys_of([1]), "checksum")]


@pytest.mark.parametrize("reason", ["queue", "degraded"])
def test_a_lower_tier_that_refuses_is_waited_for_only_if_it_is_busy(rig: Rig, reason: str) -> None:
    rig.have([1], [])
    rig.lower.refuse_stores = Throttled(reason)
    offer = rig.offer([1])
    assert offer.settled == (reason != "queue")
    rig.now = DEMOTION_S
    rig.chain.poll()
    rig.chain.poll()
    assert offer.settled
    assert rig.upper.counts["demotions_refused"] == 1
    rig.lower.refuse_stores = None
    assert rig.offer([1]).settled
    assert rig.in_lower([1]) == [], "for a while nothing is asked of it"
    rig.now += PAUSE_S
    rig.offer([1])
    assert rig.in_lower([1]) == [1]


def test_a_stuck_demotion_keeps_nobody_waiting(rig: Rig) -> None:
    rig.have([1, 2], [])
    rig.lower.held = True
    assert not rig.offer([1]).settled
    rig.lower.stuck()
    assert rig.offer([2]).settled
    assert rig.lower.submitted["store"] == 1, "the buffer is in use"
    rig.lower.held = False
    assert rig.offer([2]).settled
    assert rig.in_lower([1, 2]) == [1, 2]


def test_loads_go_on_while_blocks_are_demoted(rig: Rig) -> None:
    rig.have([1, 2], [3])
    rig.lower.held = True
    offer = rig.offer([1])
    assert not offer.settled
    assert rig.outcomes([2]) == {Done(): [2]}
    rig.lower.held = False
    rig.chain.poll()
    rig.chain.poll()
    assert offer.settled


# -- under a core ----------------------------------------------------------------------------------


def two_tiers() -> tuple[TierRig, int]:
    """Return a core over two tiers whose lower one has blocks 0 to 3, and an attached session."""
    rig = TierRig(behind=True)
    session = rig.attach()
    rig.save(session, keys(*range(4)))
    space = rig.state.namespaces.get(1)
    rig.tier.offers.append(Offer(rig.tiering.family(space, 0), keys(*range(4))))
    rig.turn(4)
    assert rig.behind.keys() == set(keys(*range(4)))
    return rig, session


def test_what_one_tier_drops_and_another_has_stays_saved() -> None:
    rig, session = two_tiers()
    rig.tier.evict(keys(0))
    rig.tier.evict(keys(1))
    rig.behind.evict(keys(1))
    rig.turn()
    assert rig.copy_state(session, keys(0)[0]) == CopyState.SAVED
    assert rig.copy_state(session, keys(1)[0]) == CopyState.NOT


def test_blocks_of_the_lower_tier_are_promoted_until_the_epoch_ends() -> None:
    rig, session = two_tiers()
    rig.drop(session, keys(*range(4)))
    rig.tier.evict(keys(*range(4)))
    rig.want(session, keys(0, 1))
    rig.settle()
    assert rig.in_memory(session, keys(0, 1)) == [True, True]
    assert rig.behind.submitted["load"] == 2
    rig.call(rig.core.bump_namespace, rig.state.namespaces.get(1).digest, None)
    space = rig.state.namespaces.get(1)
    assert not rig.tiering.present(space, 0, keys(*range(4))).any()
    rig.want(session, keys(2, 3))
    rig.settle()
    assert rig.behind.submitted["load"] == 2


def test_wrong_bytes_that_another_tier_makes_good_are_counted() -> None:
    rig, session = two_tiers()
    rig.drop(session, keys(0))
    rig.tier.damage(keys(0)[0])
    rig.want(session, keys(0))
    rig.settle()
    assert rig.in_memory(session, keys(0)) == [True]
    rig.turn()
    assert rig.count_of("checksum_failures", "ssd") == 1
    assert rig.copy_state(session, keys(0)[0]) == CopyState.SAVED


def test_copies_are_dropped_in_all_tiers() -> None:
    rig, _ = two_tiers()
    space = rig.state.namespaces.get(1)
    name = rig.tiering.name(space)
    rig.call(rig.core.drop_copies, space.digest)
    dropped = [rig.tiering.forget_copies(space, name, 3) for _ in range(5)]
    assert (sum(dropped), dropped[-1]) == (8, 0)
    assert not rig.tier.keys() | rig.behind.keys()
