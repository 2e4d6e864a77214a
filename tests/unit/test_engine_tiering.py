"""The loop's turns between core and lower tier: pace, patience and reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.core_kit import contract, full, key, keys, refused
from support.follower import Follower
from support.tier_rig import MakeRig, TierRig

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Tier
from kvhearth_server.core.publishing import PublishPolicy
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.engine.tiering.promotion import BEGUN_AT_ONCE
from kvhearth_server.engine.tiering.writeback import PATIENCE_S, READ_BACK_PATIENCE_S
from kvhearth_server.tiers.base import Failed, Throttled

TURN_SLOTS = 256


def gets_room(rig: TierRig, session: int, seconds: float) -> bool:
    """Whether a full memory accepts a block within ``seconds``."""
    end = rig.now + seconds
    rig.check()
    while rig.now < end:
        rig.now += 0.25
        rig.tiering.turn()  # unchecked: nothing but time changes
        try:
            rig.put(session, [key(1000)])
        except KVHearthError as error:
            if error.reason is not Reason.NO_SPACE:
                raise
        else:
            return True
    return False


@pytest.mark.parametrize("how", ["batches", "blocks", "hangs"])
def test_a_tier_that_makes_no_progress_is_waited_for_only_so_long(
    tier_rig: MakeRig, how: str
) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    if how == "blocks":
        rig.tier.spoil = lambda load, named: None if load else Throttled("full", 0.02)
    elif how == "hangs":
        rig.tier.held = True
    else:
        rig.tier.refuse_stores = Throttled("full", 0.02)
    rig.put(session, keys(*range(30)))
    rig.turn()
    if how == "hangs":
        rig.tier.stuck()
        rig.put(session, keys(30, 31))
    else:
        rig.put(session, keys(30, 31))
    assert not gets_room(rig, session, PATIENCE_S - 0.5)
    for _ in range(4):
        rig.now += 0.25
        rig.turn()
    if how == "hangs":
        # A block that is being written keeps its room; a block queued behind it gives up its own.
        assert rig.copy_state(session, key(0)) == CopyState.WRITING
        assert rig.copy_state(session, key(31)) == CopyState.REFUSED
    assert gets_room(rig, session, 2.0)
    assert rig.count_of("demotion_refused", "slow") > 0


def test_progress_is_waited_for_as_long_as_it_takes(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2, queue_writes=4)
    session = rig.attach()
    rig.put(session, keys(*range(32)))
    rig.tier.held = True
    for _ in range(16):
        rig.turn()
        rig.state.writeback_queue.under_pressure = True
        rig.now += PATIENCE_S * 0.9
        rig.tier.lose_blocks()
        rig.turn()
    assert rig.count_of("demotion_refused", "slow") == 0
    assert rig.tier.keys() == set(keys(*range(32)))


def test_a_log_that_is_read_back_is_waited_for_unless_its_drive_hangs(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.refuse_stores = Throttled("recovering", 0.1)
    rig.tier.recovering = True
    rig.put(session, keys(*range(32)))
    for _ in range(3):
        assert not gets_room(rig, session, READ_BACK_PATIENCE_S * 0.9)
        rig.tier.progress = (rig.tier.progress[0] + 1,)
    assert rig.count_of("demotion_refused", "slow") == 0
    assert gets_room(rig, session, READ_BACK_PATIENCE_S * 1.1)
    assert rig.count_of("demotion_refused", "slow") > 0


def test_only_pressed_blocks_are_written_while_the_log_is_read_back(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.recovering = True
    rig.put(session, keys(*range(32)))
    rig.turn(5)
    assert not rig.tier.keys(), "they may be in a part that is not read back yet"
    assert 0 < rig.tiering.pause_s() <= 0.1
    rig.tier.held = True
    with refused(Reason.NO_SPACE):
        rig.reserve(session, 1)
    rig.now += 0.2
    rig.turn()
    written = rig.tier.submitted["store"]
    assert 0 < written < 32
    rig.tier.held = False
    rig.now += 1
    rig.turn(5)
    assert rig.tier.submitted["store"] == written, "nobody wanted more room"
    assert gets_room(rig, session, PATIENCE_S)
    assert rig.count_of("demotion_refused", "slow") == 0
    rig.tier.recovering = False
    rig.now += 1
    rig.settle()


def test_a_tier_that_makes_small_steps_is_not_given_up(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.held = True
    rig.put(session, keys(*range(32)))
    for _ in range(8):
        assert not gets_room(rig, session, PATIENCE_S * 0.9)
        rig.tier.progress = (rig.tier.progress[0] + 1,)
    assert rig.count_of("demotion_refused", "slow") == 0
    rig.tier.held = False
    rig.settle()
    assert rig.tier.keys() == set(keys(*range(32)))


def test_a_process_that_was_stopped_gives_nothing_up(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.refuse_stores = Throttled("full", 0.02)
    rig.put(session, keys(*range(32)))
    assert not gets_room(rig, session, 0.5)
    rig.now += 3600
    rig.turn()
    rig.tier.refuse_stores = None
    rig.settle()
    assert rig.tier.keys() == set(keys(*range(32)))
    assert rig.count_of("demotion_refused", "slow") == 0


@pytest.mark.parametrize("how", ["batches", "blocks"])
def test_a_full_tier_is_not_asked_again_and_again(tier_rig: MakeRig, how: str) -> None:
    rig = tier_rig(slabs=64)
    session = rig.attach()
    if how == "batches":
        rig.tier.refuse_stores = Throttled("full", 0.02)
    else:
        rig.tier.spoil = lambda load, named: Throttled("full", 0.02)
    rig.put(session, keys(*range(100)))
    rig.turn()
    rig.turn()
    before = rig.tier.submitted["store"]
    rig.tiering.due.clear()
    assert 0 < rig.tiering.pause_s() <= 0.1
    rig.turn(20)
    rig.tiering.wake()
    assert rig.tier.submitted["store"] == before
    assert not rig.tiering.due.is_set()
    rig.tier.refuse_stores = None
    rig.tier.spoil = lambda load, named: None
    rig.settle()
    assert len(rig.tier.keys()) == 100


def test_a_tenant_that_may_hold_nothing_does_not_keep_the_loop_busy(tier_rig: MakeRig) -> None:
    rig = tier_rig(held_fraction_max=0.5)
    session = rig.attach()
    rig.tier.refuse_stores = Throttled("recovering")
    rig.put(session, keys(*range(32)))
    rig.put(session, keys(*range(32, 40)))
    rig.lookup(session, keys(*range(32)), lease_id=1)
    rig.tier.refuse_stores = None
    rig.now += 1
    rig.turn()
    rig.tiering.due.clear()
    rig.turn(5)
    assert not rig.tiering.due.is_set()


def test_a_turn_has_bounded_work(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=256)
    session = rig.attach(contract(full(), full(shards=1)))
    for start in range(0, 800, 200):
        rig.put(session, keys(*range(start, start + 200)), kv_group=start // 200 % 2)
    rig.turn()
    assert 0 < rig.tier.submitted["store"] <= TURN_SLOTS
    assert rig.tiering.due.is_set()
    rig.settle()
    for start in range(0, 800, 200):
        rig.drop(session, keys(*range(start, start + 200)), start // 200 % 2)
    rig.tier.held = True
    rig.want(session, keys(*range(200), *range(400, 600)))
    assert 0 < rig.tier.submitted["load"] <= TURN_SLOTS
    rig.turn()
    assert rig.tier.submitted["load"] <= 2 * TURN_SLOTS
    rig.tier.held = False
    rig.settle()


@pytest.mark.parametrize("shards", [1, 3, 8, 64])
def test_blocks_of_many_shards_fit_the_queues_of_the_tier(tier_rig: MakeRig, shards: int) -> None:
    count = 240 // shards
    rig = tier_rig(slabs=64, queue_writes=96, queue_reads=96)
    session = rig.attach(contract(full(shards=shards)))
    rig.save(session, keys(*range(count)))
    assert rig.tier.keys() == set(keys(*range(count)))
    rig.drop(session, keys(*range(count)))
    rig.want(session, keys(*range(count)))
    rig.settle()
    assert all(rig.in_memory(session, keys(*range(count))))


def test_a_tier_that_is_degraded_is_asked_again_later(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.refuse_stores = Throttled("degraded", 60.0)
    rig.put(session, keys(*range(16)))
    rig.turn()
    assert rig.copy_state(session, key(0)) == CopyState.REFUSED
    rig.put(session, keys(*range(16, 32)))
    rig.put(session, keys(*range(40, 72)))
    assert rig.count_of("demotion_refused", "degraded") == 16 + 16 + 32
    rig.tier.refuse_stores = None
    rig.now += 59
    rig.turn()
    rig.lookup(session, keys(40))
    rig.settle()
    assert not rig.tier.keys()
    rig.now += 2
    rig.turn()
    rig.lookup(session, keys(40))
    rig.settle()
    assert rig.tier.keys() == {key(40)}


def test_wishes_that_wait_are_bounded(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=64)
    session = rig.attach()
    rig.save(session, keys(*range(600)))
    rig.drop(session, keys(*range(600)))
    rig.tier.held = True
    promotion_queue = rig.lookup(session, keys(*range(600))).promotion_queue
    for lease_id in range(1, 200):
        rig.tiering.promote(promotion_queue, rig.group(session).number, lease_id)
    assert rig.tiering.promoter.queue.blocks <= 1 << 16
    assert rig.count_of("promotion_failed", "queue") > 0
    rig.tiering.promoter.group_ended(rig.group(session).number)
    assert rig.tiering.promoter.queue.blocks == 0
    rig.tier.held = False
    rig.settle()


def test_evictions_of_unknown_names_are_nobody_s(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1))
    rig.tier.evict(keys(1))
    (known,) = rig.tier.take_evicted()
    strange = type(known)(bytes(32), known.group, known.keys)
    wrong = type(known)(bytes(32), known.group, known.keys, "checksum")
    rig.tier._evicted = [strange, wrong]
    rig.turn()
    assert rig.copy_state(session, key(1)) == CopyState.SAVED
    assert rig.count_of("checksum_failures", "ssd") == 1, "wrong bytes are counted all the same"


def test_a_name_of_a_forgotten_namespace_is_nobody_s(tier_rig: MakeRig) -> None:
    rig = tier_rig(namespaces_max=1)
    first = rig.attach()
    rig.save(first, keys(1))
    name = next(iter(rig.tier._blocks))[0]
    rig.drop(first, keys(1))
    rig.leave(first)
    second = rig.attach(contract(full(), revision="other"), engine_id="other")
    rig.save(second, keys(1))
    assert rig.tiering.names.namespace(name) is None


def test_events_tell_what_is_on_no_tier_any_more(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1, 2))
    rig.drop(session, keys(1))
    reader = Follower(rig, session)
    reader.news()
    rig.tier.evict(keys(1, 2))
    rig.turn()
    (event,) = reader.news()
    assert (event.keys, event.kind, event.cause) == ((key(1),), "removed", "space")


def test_a_block_that_a_remote_has_moves_there_and_is_not_listed(tier_rig: MakeRig) -> None:
    rig = tier_rig(remote=True, local=False, policy=PublishPolicy.ALL)
    session = rig.attach()
    reader = Follower(rig, session)
    for number, tiers in ((1, {}), (2, {(0, key(2)): Tier.REMOTE})):
        rig.put(session, keys(number))
        rig.turn(4)
        rig.drop(session, keys(number))
        reader.news()
        assert reader.there() == tiers


def test_what_was_read_back_is_listed(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1))
    rig.drop(session, keys(1))
    rig.tier.recovering = True
    (name, block), *_ = rig.tier._blocks.items()
    rig.tier.lose(keys(1))
    rig.turn()
    reader = Follower(rig, session)
    reader.news()
    rig.tier._blocks[name] = block
    rig.tier.recovering = False
    rig.turn()
    reader.news()
    assert reader.there() == {(0, key(1)): Tier.SSD}


def test_blocks_that_the_tier_itself_found_wrong_are_as_those_of_a_load(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1, 2))
    rig.drop(session, keys(1))
    reader = Follower(rig, session)
    reader.news()
    rig.tier.evict(keys(1, 2), "checksum")
    rig.turn()
    (event,) = reader.news()
    assert (event.keys, event.kind, event.cause) == ((key(1),), "removed", "checksum")
    assert rig.count_of("checksum_failures", "ssd") == 2
    assert rig.count_of("repaired_blocks", "ssd") == 1
    rig.settle()
    assert rig.tier.keys() == {key(2)}, "the copy in memory is stored again"
    assert rig.copy_state(session, key(2)) == CopyState.SAVED


@pytest.mark.parametrize("how", ["carried", "loaded"])
def test_blocks_that_the_device_does_not_give_back_are_told_with_its_error(
    tier_rig: MakeRig, how: str
) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1, 2))
    rig.drop(session, keys(1))
    reader = Follower(rig, session)
    reader.news()
    if how == "carried":
        rig.tier.evict(keys(1, 2), "io")
    else:
        rig.tier.held = True
        rig.tier.spoil = lambda load, named: Failed("io")
        rig.want(session, keys(1))
        rig.tier.lose(keys(1))
        rig.tier.held = False
    rig.turn()
    (event,) = reader.news()
    assert (event.keys, event.kind, event.cause) == ((key(1),), "removed", "io")
    assert rig.copy_state(session, key(2)) == (
        CopyState.NOT if how == "carried" else CopyState.SAVED
    )
    assert rig.count_of("checksum_failures", "ssd") == 0


def test_a_block_found_wrong_in_memory_rises_again(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1, 2))
    head = rig.head(session, key(2))
    rig.view(head, 4096)[0] ^= 1
    bring_back = rig.tiering.repair(np.array([head]))
    generation = int(rig.state.table.generation[head])
    assert rig.call(rig.core.reading.remove_bad, np.array([head]), np.array([generation]))
    bring_back()
    rig.settle()
    assert rig.in_memory(session, keys(2)) == [True]
    assert rig.count_of("repaired_blocks", "dram") == 1


def test_a_load_that_hangs_is_told_and_keeps_its_slots(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.save(session, keys(1))
    rig.drop(session, keys(1))
    rig.tier.held = True
    rig.want(session, keys(1))
    rig.tier.stuck()
    rig.turn()
    assert rig.count_of("promotion_failed", "stuck") == 1
    assert rig.slots_in(State.LOADING) == 1
    rig.tier.spoil = lambda load, named: Failed("io")
    rig.tier.held = False
    rig.turn()
    assert rig.slots_in(State.LOADING) == 0
    assert rig.tiering.pause_s() == math.inf


def test_a_turn_whose_time_is_over_leaves_the_rest_to_the_next(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=64)
    session = rig.attach()
    names = keys(*range(3 * BEGUN_AT_ONCE))
    rig.save(session, names)
    rig.drop(session, names)
    rig.tier.held = True
    rig.want(session, names)  # the call itself begins one load
    begun = [rig.tier.submitted["load"]]
    for _ in range(2):
        rig.tiering.due.clear()
        rig.tiering.turn(0.0)
        begun.append(rig.tier.submitted["load"])
        assert rig.tiering.due.is_set() == (begun[-1] < len(names))
    assert begun == [BEGUN_AT_ONCE, 2 * BEGUN_AT_ONCE, 3 * BEGUN_AT_ONCE]
    rig.tier.held = False
    ended = []
    for _ in range(3):
        rig.tiering.turn(0.0)
        ended.append(rig.in_memory(session, names).count(True))
    assert ended == begun


def test_drops_of_a_tier_are_told_one_turn_after_another(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=8)
    session = rig.attach()
    rig.save(session, keys(1, 2))
    told: list[list[bytes]] = []
    lost = rig.core.writeback.lost
    rig.core.writeback.lost = lambda space, group, names: (
        told.append(names)
        or lost(  # type: ignore[method-assign]
            space, group, names
        )
    )
    for number in (1, 2):
        rig.tier.evict(keys(number))
    for count in (1, 2):
        rig.tiering.turn(0.0)
        assert len(told) == count
