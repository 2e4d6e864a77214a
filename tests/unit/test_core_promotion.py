"""Promotion in the core: slots of the blocks, their requesters, and how both end."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_kit import contract, full, key, keys, window
from support.tier_rig import MakeRig, TierRig

from kvhearth.model import Tier
from kvhearth_server.core.promotion import REQUESTERS_MAX
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.tiers.base import Throttled


def writeback_rig(tier_rig: MakeRig, count: int, **options: object) -> tuple[TierRig, int]:
    """A rig whose tier holds blocks 0 to ``count``, none of them in memory."""
    rig = tier_rig(**options)  # type: ignore[arg-type]
    session = rig.attach()
    for start in range(0, count, 32):
        part = keys(*range(start, min(count, start + 32)))
        rig.save(session, part)
        rig.drop(session, part)
    assert rig.tier.keys() == set(keys(*range(count)))
    return rig, session


def test_a_lookup_tells_where_blocks_are_and_promotes_them(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 4)
    rig.put(session, keys(9))
    found = rig.lookup(session, [*keys(0, 1), key(77)])
    one = found.groups[0]
    assert one.present.tolist() == [True, True, False]
    assert not one.ready.any()
    assert one.tiers.tolist() == [Tier.SSD, Tier.SSD, Tier.NOWHERE]
    assert rig.tiering.eta_us(found.promotion_queue) > 0
    rig.want(session, keys(0, 1))
    rig.settle()
    assert rig.lookup(session, keys(0, 1), lease_id=5).hit_tokens == 32
    assert rig.copy_state(session, key(0)) == CopyState.SAVED
    rig.settle()
    assert rig.tier.submitted["store"] == 5


def test_blocks_of_several_shards_are_promoted_whole(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=8)
    session = rig.attach(contract(full(4000, shards=4), window(32, 5000)))
    rig.save(session, keys(1, 2, 3))
    rig.save(session, keys(1, 2, 3), kv_group=1)
    for kv_group in (0, 1):
        rig.drop(session, keys(1, 2, 3), kv_group)
    found = rig.lookup_all(session, {0: keys(1, 2, 3), 1: keys(1, 2, 3)})
    rig.tiering.promote(found.promotion_queue, rig.group(session).number)
    rig.check()
    rig.settle()
    found = rig.lookup_all(session, {0: keys(1, 2, 3), 1: keys(1, 2, 3)}, lease_id=1)
    assert found.hit_tokens == 48


def test_a_key_that_is_named_twice_is_promoted_once(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 2)
    rig.want(session, keys(0, 0, 1))
    rig.settle()
    assert rig.tier.submitted["load"] == 2
    assert rig.in_memory(session, keys(0, 1)) == [True, True]


def test_a_key_that_is_named_twice_is_called_off_once(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 20, slabs=8, queue_reads=8)  # four a turn
    rig.tier.held = True
    rig.want(session, keys(*range(5), *range(20)), lease_id=1)
    assert rig.tiering.promoter.queue.blocks == 16
    rig.tiering.promoter.cancel(rig.group(session).number, [1])
    assert rig.tiering.promoter.queue.blocks == 0
    rig.tier.held = False
    rig.settle()
    assert rig.tier.submitted["load"] == 4


def test_many_who_ask_for_the_same_load_it_once(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 300, slabs=80)
    rig.tier.held = True
    for lease_id in range(1, 6):
        rig.want(session, keys(*range(300)), lease_id=lease_id)
        rig.turn()
    rig.tier.held = False
    rig.settle()
    assert rig.tier.submitted["load"] == 300
    assert all(rig.in_memory(session, keys(*range(300))))


def test_who_asks_again_and_again_waits_once_and_keeps_no_other_out(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 120, slabs=8)
    other = rig.attach(engine_id="other")
    rig.tier.held = True
    promotion_queue = rig.lookup(session, keys(*range(100))).promotion_queue
    for _ in range(700):
        rig.tiering.promote(promotion_queue, rig.group(session).number)
    assert rig.tiering.promoter.queue.blocks <= 100
    rig.want(other, keys(*range(100, 104)))
    rig.want(session, keys(*range(100)))
    assert rig.count_of("promotion_failed", "queue") == 0
    rig.tier.held = False
    rig.settle()
    assert all(rig.in_memory(other, keys(*range(100, 104))))
    assert rig.tier.submitted["load"] == 104


@pytest.mark.parametrize("lack", ["room", "queue"])
def test_a_block_without_room_at_once_is_promoted_later(tier_rig: MakeRig, lack: str) -> None:
    bounds = {"queue_reads": 8} if lack == "queue" else {}
    rig, session = writeback_rig(tier_rig, 60, slabs=8, **bounds)
    rig.want(session, keys(*range(60)))
    assert len(rig.core.promotions) < 60
    rig.settle()
    assert all(rig.in_memory(session, keys(*range(60))))


def test_what_waits_for_room_does_not_keep_the_loop_busy(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 60, slabs=8)
    rig.tier.held = True
    rig.want(session, keys(*range(60)))
    rig.turn()
    rig.tiering.due.clear()
    rig.turn(5)
    assert not rig.tiering.due.is_set()


def test_what_finds_no_room_while_nothing_is_under_way_is_told(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 4, held_fraction_max=0.25)
    rig.take(session, 16)
    rig.want(session, keys(*range(4)))
    assert rig.tiering.idle
    assert rig.count_of("promotion_failed", "no_room") == 4


def test_a_cancelled_promotion_frees_its_slots_when_the_tier_is_done_with_them(
    tier_rig: MakeRig,
) -> None:
    rig, session = writeback_rig(tier_rig, 4)
    rig.tier.held = True
    rig.want(session, keys(*range(4)), lease_id=7)
    rig.tiering.promoter.cancel(rig.group(session).number, [7])
    rig.turn()
    assert rig.slots_in(State.LOADING) == 4
    rig.tier.held = False
    rig.turn()
    assert rig.slots_in(State.LOADING) == 0
    assert rig.count_of("prefetch_cancelled") == 4
    assert not any(rig.in_memory(session, keys(*range(4))))


def test_what_waits_is_cancelled_with_its_request(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 60, slabs=8)
    rig.tier.held = True
    rig.want(session, keys(*range(60)), lease_id=7)
    group = rig.group(session).number
    rig.leave(session)
    rig.tiering.promoter.group_ended(group)
    rig.tier.held = False
    rig.settle()
    assert rig.tier.submitted["load"] == 32
    assert rig.slots_in(State.LOADING) == 0
    assert rig.state.namespaces.get(1).used_bytes == 0


def test_requesters_of_a_promotion_are_bounded(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 2)
    rig.tier.held = True
    wanted = rig.lookup(session, keys(0, 1)).promotion_queue
    for lease_id in range(1, 2 * REQUESTERS_MAX):
        rig.tiering.promote(wanted, rig.group(session).number, lease_id)
    rig.turn()
    promotions = rig.core.promotions
    assert len(promotions._by_requester) <= REQUESTERS_MAX + 1
    rig.tiering.promoter.cancel(rig.group(session).number, range(1, 2 * REQUESTERS_MAX))
    rig.tier.held = False
    rig.settle()
    assert rig.in_memory(session, keys(0, 1)) == [True, True]
    assert not promotions._by_requester


def test_blocks_that_rise_into_new_weights_are_dropped(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 2)
    rig.tier.held = True
    rig.want(session, keys(0, 1))
    rig.core.bump_epoch(session, 1)
    rig.tier.held = False
    rig.settle()
    assert not any(rig.in_memory(session, keys(0, 1)))
    assert not rig.lookup(session, keys(0, 1)).groups[0].present.any()


def test_wrong_bytes_below_are_a_miss_and_never_served(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 2)
    rig.tier.damage(key(0))
    rig.want(session, keys(0, 1))
    rig.settle()
    assert rig.in_memory(session, keys(0, 1)) == [False, True]
    assert not rig.lookup(session, keys(0)).groups[0].present.any()
    assert rig.count_of("checksum_failures", "ssd") == 1


def test_a_promotion_stays_within_the_quota(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 20)
    rig.state.namespaces.get(1).quota_bytes = 10 * 4096
    rig.put(session, keys(100))
    rig.settle()
    rig.want(session, keys(*range(20)))
    rig.settle()
    assert rig.state.namespaces.get(1).used_bytes <= 10 * 4096
    assert any(rig.in_memory(session, keys(*range(20))))


def test_a_forgotten_namespace_gets_nothing(tier_rig: MakeRig) -> None:
    rig = tier_rig(namespaces_max=1)
    session = rig.attach()
    rig.save(session, keys(1))
    bring_back = rig.tiering.repair(np.array([rig.head(session, key(1))]))
    rig.drop(session, keys(1))
    rig.leave(session)
    other = rig.attach(contract(full(8192)), engine_id="other")
    bring_back()
    rig.settle()
    rig.put(other, keys(1))
    assert rig.tier.submitted["load"] == 0


def test_stray_slots_of_an_earlier_run_wait_for_its_requests(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.tier.loads_of_the_dead = True
    rig.put(session, keys(1))
    taken = rig.state.pools[0].take(4096, 3)
    rig.core.promotions.adopt(taken)
    rig.turn()
    assert rig.slots_in(State.QUARANTINED) == 3
    rig.tier.loads_of_the_dead = False
    rig.turn()
    assert rig.slots_in(State.QUARANTINED) == 0
    assert not len(rig.core.promotions.orphaned_loads)


def test_a_tier_that_takes_no_loads_is_told_as_such(tier_rig: MakeRig) -> None:
    rig, session = writeback_rig(tier_rig, 2)
    rig.tier.refuse_loads = Throttled("degraded")
    rig.want(session, keys(0, 1))
    rig.settle()
    assert rig.count_of("promotion_failed", "degraded") == 2
    assert rig.slots_in(State.LOADING) == 0
