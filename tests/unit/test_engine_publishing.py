"""Publishing to remotes and loading from them, over a core with real bytes."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_kit import contract, full, key, keys, window
from support.mover_double import ScriptedMover
from support.tier_rig import MakeRig, TierRig

from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth_server.core.publishing import PublishPolicy
from kvhearth_server.core.slot_table import CopyState
from kvhearth_server.tiers.base import Failed, Offer, Throttled
from kvhearth_server.tiers.remote.mover import Put

ALL, REUSE, NEVER = PublishPolicy.ALL, PublishPolicy.REUSE, PublishPolicy.NEVER


def put_keys(mover: ScriptedMover) -> list[bytes]:
    """Return the keys of all puts, in order."""
    return [key for each in mover.requests if isinstance(each, Put) for key in each.keys]


def rest(rig: TierRig) -> None:
    """Run turns until nothing waits, nothing is published and nothing is loaded."""
    for _ in range(50):
        if not rig.core.publishing.waiting:
            break
        rig.now += 0.01
        rig.turn()
    rig.settle()


def use(rig: TierRig, session: int, named: list[bytes]) -> None:
    """Look blocks up with a lease, and release it."""
    lease_id = rig.fresh_id = getattr(rig, "fresh_id", 0) + 1  # type: ignore[attr-defined]
    rig.lookup(session, named, lease_id=lease_id)
    rig.core.reading.release(session, [lease_id])
    rest(rig)


def known(rig: TierRig, session: int, named: list[bytes]) -> list[int]:
    """Look blocks up until nothing is being asked; return their tiers."""
    for _ in range(20):
        found = rig.lookup(session, named)
        if not found.asking:
            return found.groups[0].tiers.tolist()
        rig.turn()
    raise AssertionError("never known")


@pytest.mark.parametrize("local", [False, True])
def test_the_second_use_publishes_a_chain_parents_first(tier_rig: MakeRig, local: bool) -> None:
    rig = tier_rig(local=local, remote=True)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(*range(8)))
    rig.turn(3)
    use(rig, session, keys(*range(8)))
    assert put_keys(mover) == []
    use(rig, session, keys(*range(6)))
    assert put_keys(mover) == keys(*range(6))
    puts = [each for each in mover.requests if isinstance(each, Put)]
    assert [parent for each in puts for parent in each.parents] == [b"", *keys(*range(5))]
    use(rig, session, keys(*range(8)))
    assert put_keys(mover) == keys(*range(8))
    for _ in range(3):
        use(rig, session, keys(*range(8)))
    assert put_keys(mover) == keys(*range(8)), "each once"
    assert rig.count_of("published_blocks") == 8


def test_a_block_is_published_after_those_before_it(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(*range(8)))
    for _ in range(2):
        use(rig, session, keys(5))
    assert put_keys(mover) == keys(*range(6))


def test_policies(tier_rig: MakeRig) -> None:
    for policy, wanted in ((ALL, keys(*range(4))), (NEVER, [])):
        rig = tier_rig(local=False, remote=True, policy=policy)
        session, mover = rig.attach(), rig.mover
        rig.put(session, keys(*range(4)))
        rig.turn(4)
        for _ in range(3):
            use(rig, session, keys(*range(4)))
        assert put_keys(mover) == wanted


def test_publishing_does_not_hold_eviction_back(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2, local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    mover.held = True
    for number in range(80):
        rig.put(session, [key(number)])
        rig.turn()
    assert sum(len(each.keys) for each in mover.using_slots()) <= 3
    assert len(put_keys(mover)) < 80
    mover.held = False
    rest(rig)


@pytest.mark.parametrize("reason", ["open", "rate"])
def test_a_remote_that_refuses_for_a_moment_gets_the_blocks_later(
    tier_rig: MakeRig, reason: str
) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    mover.refusal = Throttled(reason, 0.5)  # type: ignore[arg-type]
    rig.put(session, keys(*range(4)))
    rig.turn(4)
    assert rig.core.publishing.waiting == 4
    assert 0 < rig.tiering.pause_s() <= 0.5
    mover.refusal = None
    rig.now += 0.6
    rig.turn(4)
    assert put_keys(mover) == keys(*range(4))


@pytest.mark.parametrize("asked", [False, True])
def test_what_finds_no_staging_is_left_out_with_all_behind_it_until_it_is_used(
    tier_rig: MakeRig, asked: bool
) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    if asked:
        mover.held = True
        rig.put(session, keys(*range(4)))
        rig.turn(4)
        assert [each.keys for each in mover.requests] == [keys(*range(4))]
        mover.held = False
    mover.refusal = Throttled("queue")  # type: ignore[arg-type]
    rig.put(session, keys(*range(4)))
    rig.turn(4)
    assert (rig.core.publishing.waiting, rig.count_of("publish_skipped", "queue")) == (0, 4)
    mover.refusal = None
    rig.turn(4)
    assert put_keys(mover) == []
    use(rig, session, keys(3))
    assert put_keys(mover) == keys(*range(4))


def test_a_failed_put_is_counted_and_offered_again(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    mover.failure = Failed("timeout")  # type: ignore[arg-type]
    rig.put(session, keys(0, 1))
    rig.turn(4)
    assert rig.count_of("publish_failed", "timeout") == 2
    mover.failure = None
    use(rig, session, keys(0, 1))
    assert rig.count_of("published_blocks") == 2


def test_wrong_bytes_in_memory_are_not_published(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(0, 1))
    head = rig.head(session, key(1))
    rig.spoilt.add(head)
    rig.view(head, 1)[:] ^= 0xFF
    for _ in range(2):
        use(rig, session, keys(0, 1))
    rig.turn(4)
    assert [name[1] for name in mover.values] == keys(0)
    assert rig.in_memory(session, keys(0, 1)) == [True, False]
    assert rig.count_of("checksum_failures", "publishing") == 1


@pytest.mark.parametrize("local", [False, True])
def test_blocks_come_back_from_the_remote(tier_rig: MakeRig, local: bool) -> None:
    rig = tier_rig(local=local, remote=True, policy=ALL)
    session = rig.attach()
    rig.put(session, keys(*range(8)))
    rest(rig)
    rig.drop(session, keys(*range(8)))
    rig.tier.lose(keys(*range(8)))
    rig.now += 100.0  # the existence cache has forgotten
    found = rig.lookup(session, keys(*range(8)))
    assert found.asking
    assert found.groups[0].tiers.tolist() == [Tier.REMOTE] * 8
    assert not found.groups[0].present.any()
    assert rig.tiering.eta_us([], asking=True) > 0
    assert known(rig, session, keys(*range(8))) == [Tier.REMOTE] * 8
    rig.want(session, keys(*range(8)), lease_id=99)
    rest(rig)
    assert known(rig, session, keys(*range(8))) == [Tier.DRAM] * 8
    rest(rig)
    if local:  # the remote may lose them, so they are written back again
        assert rig.tier.keys() == set(keys(*range(8)))
        assert rig.copy_state(session, key(3)) == CopyState.SAVED
    assert rig.count_of("promoted_blocks") == 8


def test_a_hole_ends_a_load_and_wrong_bytes_are_never_served(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(*range(8)))
    rest(rig)
    rig.drop(session, keys(*range(8)))
    for name, value in mover.values.items():
        if name[1] == key(5):
            value.content = bytes(len(value.content))
    rig.want(session, keys(*range(8)), lease_id=99)
    rest(rig)
    there = rig.in_memory(session, keys(*range(8)))
    assert there[:6] == [True] * 5 + [False]
    assert rig.count_of("checksum_failures", "remote") == 1
    rig.turn()
    assert key(5) not in {name[1] for name in mover.values}
    assert known(rig, session, keys(*range(8)))[5] == Tier.NOWHERE


def test_a_caller_that_does_not_wait_costs_no_read(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(0, 1))
    rest(rig)
    rig.drop(session, keys(0, 1))
    mover.requests.clear()
    found = rig.lookup(session, keys(0, 1), lease_id=7)
    (request,) = found.promotion_queue
    late = type(request)(
        request.namespace, 0, request.spec, request.keys, request.parents, until=rig.now - 1
    )
    rig.tiering.promote([late], rig.group(session).number, 7)
    rest(rig)
    assert not mover.requests
    assert rig.count_of("promotion_failed", "timeout") == 2
    rig.tiering.promote(found.promotion_queue, rig.group(session).number, 7)
    rest(rig)
    assert rig.in_memory(session, keys(0, 1)) == [True, True]


def test_weights_without_a_label_are_off_the_remote(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(0, 1))
    rest(rig)
    first = {name[0] for name in mover.values}
    rig.call(rig.core.bump_epoch, session, rig.epoch(session))
    mover.requests.clear()
    assert known(rig, session, keys(0, 1)) == [Tier.NOWHERE] * 2
    rig.put(session, keys(2, 3))
    rig.turn(6)
    assert not mover.requests
    rig.call(rig.core.bump_epoch, session, rig.epoch(session), label="step 2")
    assert known(rig, session, keys(0, 1)) == [Tier.NOWHERE] * 2
    rig.put(session, keys(4, 5))
    rest(rig)
    second = {name[0] for name in mover.values} - first
    assert len(second) == 1
    rig.call(rig.core.bump_epoch, session, rig.epoch(session), label="")
    assert known(rig, session, keys(0, 1)) == [Tier.REMOTE] * 2, "the first weights again"


def test_a_label_is_given_once(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True)
    session = rig.attach()
    epoch = rig.epoch(session)
    assert rig.core.bump_epoch(session, epoch, label="a", relabel=True) == epoch
    assert rig.core.bump_epoch(session, epoch, label="a", relabel=True) == epoch
    with pytest.raises(Exception, match="another label") as error:
        rig.core.bump_epoch(session, epoch, label="b", relabel=True)
    assert error.value.reason is Reason.STALE_EPOCH  # type: ignore[attr-defined]
    assert rig.epoch(session) == epoch


def test_a_dead_remote_leaves_lookups_as_they_are(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=True, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    mover.up = False
    rig.turn()
    rig.save(session, keys(*range(4)))
    rig.drop(session, keys(0, 1))
    mover.requests.clear()
    found = rig.lookup(session, keys(*range(6)))
    assert found.groups[0].tiers.tolist() == [Tier.SSD] * 2 + [Tier.DRAM] * 2 + [Tier.NOWHERE] * 2
    assert not found.asking
    assert not mover.requests
    assert np.count_nonzero(found.groups[0].present) == 4


def leave(rig: TierRig, session: int, named: list[bytes]) -> None:
    """Have the SSD offer hot blocks and drop them at its next step, as when it needs the room."""
    space = rig.space(session)
    rig.tier.offers.append(Offer(rig.tiering.names.family(space, 0), named))
    rig.turn(2)  # a read that has begun ends
    rig.tier.evict(named)
    rest(rig)


def test_hot_blocks_that_the_ssd_drops_are_published_from_memory(tier_rig: MakeRig) -> None:
    rig = tier_rig(remote=True)
    session, mover = rig.attach(), rig.mover
    rig.save(session, keys(*range(4)))
    leave(rig, session, keys(2, 3))
    assert put_keys(mover) == keys(*range(4)), "with those before them"
    leave(rig, session, keys(2, 3))
    assert put_keys(mover) == keys(*range(4)), "each once"


def test_hot_blocks_that_the_ssd_alone_has_are_read_and_published(tier_rig: MakeRig) -> None:
    rig = tier_rig(remote=True, buffer_bytes=1 << 20)
    session, mover = rig.attach(), rig.mover
    rig.save(session, keys(*range(4)))
    rig.drop(session, keys(*range(4)))
    leave(rig, session, keys(*range(4)))
    assert put_keys(mover) == keys(*range(4))
    assert rig.count_of("published_blocks") == 4
    assert not rig.tier.keys()
    rig.want(session, keys(*range(4)), lease_id=99)
    rest(rig)
    assert rig.in_memory(session, keys(*range(4))) == [True] * 4


@pytest.mark.parametrize("why", ["no buffer", "busy", "down", "refused", "gone"])
def test_hot_blocks_are_left_out_rather_than_waited_for(tier_rig: MakeRig, why: str) -> None:
    rig = tier_rig(remote=True, buffer_bytes=0 if why == "no buffer" else 1 << 20)
    session, mover = rig.attach(), rig.mover
    rig.save(session, keys(*range(4)))
    rig.drop(session, keys(*range(4)))
    mover.up = why != "down"
    rig.turn()
    if why == "busy":
        rig.tier.held = True
        offer = Offer(rig.tiering.names.family(rig.space(session), 0), keys(0, 1))
        rig.tier.offers.append(offer)
        rig.turn()
    if why == "refused":
        mover.refusal = Throttled("queue")  # type: ignore[arg-type]
    offer = Offer(rig.tiering.names.family(rig.space(session), 0), keys(2, 3))
    if why == "gone":
        rig.tier.lose(keys(2, 3))
    rig.tier.offers.append(offer)
    rig.turn()
    rig.tier.held = False
    rig.turn(3)
    rest(rig)
    skipped = rig.count_of("publish_skipped", "leaving") + rig.count_of("publish_skipped", "queue")
    assert skipped == 2
    assert put_keys(mover) == (keys(0, 1) if why == "busy" else [])


def test_what_the_ssd_drops_of_old_weights_stays_off_the_remote(tier_rig: MakeRig) -> None:
    rig = tier_rig(remote=True, buffer_bytes=1 << 20)
    session, mover = rig.attach(), rig.mover
    rig.save(session, keys(0, 1))
    rig.drop(session, keys(0, 1))
    family = rig.tiering.names.family(rig.space(session), 0)
    rig.call(rig.core.bump_epoch, session, rig.epoch(session), label="step 2")
    rig.tier.offers.append(Offer(family, keys(0, 1)))
    rig.turn(4)
    assert not mover.requests


def test_a_use_in_the_second_half_of_its_life_renews_a_block(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL, life_s=100.0)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(*range(4)))
    rest(rig)
    for now, count in ((49.0, 4), (51.0, 8), (52.0, 8), (90.0, 8), (102.0, 12)):
        rig.now = now
        rig.turn()
        use(rig, session, keys(*range(4)))
        assert len(put_keys(mover)) == count, f"at {now} s"
    assert rig.count_of("renewed_blocks") == 8


def test_a_renewal_that_fails_is_tried_again_after_a_pause(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL, life_s=160.0)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(0, 1))
    rest(rig)
    mover.failure = Failed("io")  # type: ignore[arg-type]
    for now, count in ((81.0, 4), (85.0, 4), (95.0, 6)):
        rig.now = now
        rig.turn()
        use(rig, session, keys(0, 1))
        assert len(put_keys(mover)) == count, f"at {now} s"
        mover.failure = None


def test_without_a_ttl_nothing_is_renewed(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(0, 1))
    rest(rig)
    rig.now = 1e6
    rig.turn()
    use(rig, session, keys(0, 1))
    assert len(put_keys(mover)) == 2


def test_the_policy_may_change(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=NEVER)
    session, mover = rig.attach(), rig.mover
    rig.put(session, keys(0, 1))
    rig.tiering.use_policy(ALL)
    rig.put(session, keys(2, 3))
    assert rig.core.publishing.waiting == 2
    rig.tiering.use_policy(NEVER)
    rest(rig)
    assert (put_keys(mover), rig.count_of("publish_skipped", "never")) == ([], 2)
    rig.tiering.use_policy(ALL)
    rig.put(session, keys(4))
    rest(rig)
    assert put_keys(mover) == keys(4)


def test_a_window_at_the_remote_needs_its_last_blocks_only(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL)
    session, mover = rig.attach(contract(full(), window(64))), rig.mover
    named = keys(*range(12))
    for kv_group in (0, 1):
        rig.put(session, named, kv_group=kv_group)
    rest(rig)
    for kv_group in (0, 1):
        rig.drop(session, named, kv_group)
    early = keys(*range(8))
    spaces = {request.family.group: request.space for request in mover.requests}
    for each in early:  # the remote dropped what nobody reads
        del mover.values[spaces[1], each]
    rig.now += 100.0  # the existence cache has forgotten
    mover.requests.clear()
    found = rig.lookup_all(session, {0: named, 1: named})
    assert found.asking
    rig.turn(4)
    found = rig.lookup_all(session, {0: named, 1: named}, lease_id=9)
    assert not found.asking
    wanted = {request.kv_group: request.keys for request in found.promotion_queue}
    assert wanted == {0: named, 1: keys(*range(8, 12))}
    rig.tiering.promote(found.promotion_queue, rig.group(session).number, 9)
    rest(rig)
    assert rig.lookup_all(session, {0: named, 1: named}).hit_tokens == 12 * 16


def test_another_tenants_blocks_are_never_found(tier_rig: MakeRig) -> None:
    rig = tier_rig(local=False, remote=True, policy=ALL, tenants=("t", "u"))
    mine, mover = rig.attach(), rig.mover
    theirs = rig.attach(tenant="u")
    rig.put(mine, keys(*range(4)))
    rest(rig)
    rig.now += 100.0
    assert known(rig, theirs, keys(*range(4))) == [Tier.NOWHERE] * 4, "the same contract and keys"
    rig.put(theirs, keys(*range(4)))
    rest(rig)
    assert len({space for space, _ in mover.values}) == 2
    assert len(mover.values) == 8
