"""The restorable part of a request: prefix, trailing window, boundary state, all together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.core_kit import (
    Rig,
    contract,
    full,
    items,
    key,
    keys,
    mamba,
    no_deadline,
    refused,
    window,
)
from support.core_model import longest_hit, needed_blocks

from kvhearth.contract import GroupSpec
from kvhearth.errors import Reason
from kvhearth.model import FLAG_SUMMED, Tier
from kvhearth_server.core.lookup import blocks_needed, hit_boundaries, usable_boundaries

LEASE = 7


def flags(text: str) -> np.ndarray:
    """Parses ``"xx.x"`` into booleans."""
    return np.array([letter == "x" for letter in text], np.bool_)


def ends(spec: GroupSpec, ready: str) -> list[int]:
    """Returns the boundaries, in blocks, up to which a group can be restored."""
    return [int(k) for k in np.flatnonzero(usable_boundaries(spec, flags(ready)))]


def longest(*groups: tuple[GroupSpec, str]) -> int:
    """Returns the longest hit in tokens; 0 if there is none."""
    found = hit_boundaries([(spec, flags(ready)) for spec, ready in groups])
    return int(found[0]) if len(found) else 0


def test_a_prefix_ends_at_its_first_hole() -> None:
    assert ends(full(), "") == [0]
    assert ends(full(), "...") == [0]
    assert ends(full(), "xxx") == [0, 1, 2, 3]
    assert ends(full(), "xx.x") == [0, 1, 2]
    assert ends(full(), ".xxx") == [0]


def test_a_state_group_needs_only_the_state_at_the_boundary() -> None:
    assert ends(mamba(), "..x.x") == [0, 3, 5]


def test_a_window_needs_the_blocks_that_the_next_token_sees() -> None:
    # 16 tokens a block. With a window of 33 tokens the next token sees the 32 before it: two
    # blocks.
    assert ends(window(33), "..xx.xxx") == [0, 4, 7, 8]
    # One token more needs a third block, if only for its last token.
    assert ends(window(34), "..xx.xxx") == [0, 8]
    # Near the start the next token sees less than the window's width.
    assert ends(window(1000), "xxx.") == [0, 1, 2, 3]
    # A window of one token sees only itself: every boundary is possible.
    assert ends(window(1), "....") == [0, 1, 2, 3, 4]


def test_all_groups_must_be_restorable_at_the_same_boundary() -> None:
    assert longest((full(), "xxxx"), (mamba(), ".x..")) == 32
    assert longest((full(), "xxxx"), (mamba(), "....")) == 0
    assert longest((full(), "xxxxxx"), (window(33), "...xx.")) == 80
    assert longest((full(), "xxx"), (window(33), "...xx.")) == 0


def test_groups_of_different_block_sizes_meet_at_common_multiples() -> None:
    small, large = full(block_tokens=16), full(block_tokens=64)
    assert longest((small, "x" * 11), (large, "xxx")) == 128
    assert longest((small, "x" * 3), (large, "xxx")) == 0
    odd = full(block_tokens=24)
    assert longest((small, "x" * 8), (odd, "x" * 8)) == 96


def test_nothing_asked_is_no_hit() -> None:
    assert len(hit_boundaries([])) == 0
    assert len(hit_boundaries([(full(), flags(""))])) == 0


@pytest.mark.parametrize("ready", ["", "xx"])
def test_block_sizes_without_a_common_multiple_in_64_bits(ready: str) -> None:
    groups = [full(block_tokens=(1 << 20) - step) for step in (1, 3, 5, 7, 9)]
    assert longest(*((spec, ready) for spec in groups)) == 0


def test_a_window_wider_than_any_machine_word() -> None:
    assert ends(window(1 << 30), "xx.x") == [0, 1, 2]


specs = st.one_of(
    st.builds(lambda size: full(block_tokens=size), st.integers(1, 4)),
    st.builds(lambda size: mamba(block_tokens=size), st.integers(1, 4)),
    st.builds(
        lambda size, tokens: window(tokens, block_tokens=size),
        st.integers(1, 4),
        st.integers(1, 20),
    ),
)
groups_of_flags = st.lists(
    st.tuples(specs, st.lists(st.sampled_from([True, True, True, False]), max_size=12)),
    min_size=1,
    max_size=3,
)


@no_deadline
@given(groups=groups_of_flags)
@example(groups=[(window(5, block_tokens=2), [False, True, True])])
def test_against_trying_every_length(groups: list[tuple[GroupSpec, list[bool]]]) -> None:
    arrays = [(spec, np.array(ready, np.bool_)) for spec, ready in groups]
    found = hit_boundaries(arrays)
    best = longest_hit(groups)
    assert (int(found[0]) if len(found) else 0) == best
    assert found.tolist() == sorted(set(found.tolist()), reverse=True)
    for tokens in found.tolist():
        # Truncated to that length, the groups have that length as their longest hit.
        cut = [(spec, ready[: tokens // spec.block_tokens]) for spec, ready in groups]
        assert longest_hit(cut) == tokens
        for spec, ready in groups:
            need = blocks_needed(spec, tokens)
            assert set(range(need.start, need.stop)) == needed_blocks(spec, tokens)
            assert all(ready[need])


# -- through the core ---------------------------------------------------------


def test_what_a_lookup_says_of_each_key() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1))
    rig.put(session, keys(2), summed=False)
    rig.put(session, keys(4))
    found = rig.lookup(session, keys(0, 1, 2, 3, 4), lease_id=LEASE)
    (one,) = found.groups
    assert one.present.tolist() == [True, True, True, False, True]
    assert one.ready.tolist() == [True, True, False, False, True]
    assert one.leased.tolist() == [True, True, False, False, False]
    assert one.tiers.tolist() == [Tier.DRAM, Tier.DRAM, Tier.DRAM, Tier.NOWHERE, Tier.DRAM]
    assert (found.hit_tokens, found.lease_id, found.short) == (32, LEASE, None)
    assert one.extents["slot"].tolist() == [rig.head(session, key(0)), rig.head(session, key(1))]
    assert (one.extents["flags"] == FLAG_SUMMED).all()
    assert one.extents["length"].tolist() == [4096, 4096]


def test_without_a_lease_nothing_is_held_and_no_extent_given() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1))
    found = rig.lookup(session, keys(0, 1))
    assert (found.hit_tokens, found.lease_id) == (32, 0)
    assert not found.groups[0].leased.any()
    assert len(found.groups[0].extents) == 0
    assert not rig.state.table.refs.any()


def test_extents_come_block_by_block_with_shards_in_rank_order() -> None:
    rig = Rig()
    session = rig.attach(contract(full(shards=2)))
    slots, generations = rig.take(session, 3)
    swapped = slots[::-1].copy()
    rig.commit(session, rig.item(keys(0, 1, 2), swapped, generations[::-1]))
    found = rig.lookup(session, keys(0, 1, 2), lease_id=LEASE)
    assert found.groups[0].extents["slot"].tolist() == swapped.reshape(-1).tolist()


def test_only_what_a_hit_needs_is_leased() -> None:
    rig = Rig()
    session = rig.attach(contract(full(), window(17), mamba()))
    for group in range(3):
        rig.put(session, keys(0, 1, 2, 3), kv_group=group)
    found = rig.lookup_all(session, dict.fromkeys(range(3), keys(0, 1, 2, 3)), lease_id=LEASE)
    assert found.hit_tokens == 64
    leased = [one.leased.tolist() for one in found.groups]
    assert leased == [[True] * 4, [False] * 3 + [True], [False] * 3 + [True]]
    assert rig.state.table.refs.sum() == 6
    rig.core.reading.release(session, [LEASE])
    rig.check()
    assert not rig.state.table.refs.any()


def test_a_group_with_fewer_keys_limits_the_hit() -> None:
    rig = Rig()
    session = rig.attach(contract(full(), full()))
    for group in range(2):
        rig.put(session, keys(0, 1, 2), kv_group=group)
    assert rig.lookup_all(session, {0: keys(0, 1, 2), 1: keys(0)}).hit_tokens == 16
    assert rig.lookup_all(session, {0: keys(0, 1, 2), 1: []}).hit_tokens == 0


def test_one_key_asked_twice_is_leased_once() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    found = rig.lookup(session, keys(0, 0), lease_id=LEASE)
    assert found.hit_tokens == 32
    assert len(found.groups[0].extents) == 2
    assert rig.state.table.refs.sum() == 1


def test_the_cap_on_what_is_held_shortens_a_hit() -> None:
    rig = Rig(1, held_fraction_max=0.5)
    session = rig.attach()
    for number in range(0, 12, 4):
        rig.put(session, keys(*range(number, number + 4)))
    found = rig.lookup(session, keys(*range(12)), lease_id=LEASE)
    assert (found.hit_tokens, found.short) == (8 * 16, Reason.HELD_CAP)
    assert found.groups[0].leased.sum() == 8
    # Blocks that are already held do not count again.
    again = rig.lookup(session, keys(*range(12)), lease_id=LEASE + 1)
    assert (again.hit_tokens, again.short) == (8 * 16, Reason.HELD_CAP)
    # The cap applies only with a lease.
    assert rig.lookup(session, keys(*range(12))).hit_tokens == 12 * 16
    with refused(Reason.HELD_CAP):
        rig.reserve(session, 1)
    rig.core.reading.release(session, [LEASE, LEASE + 1])
    assert rig.reserve(session, 1).short is None


def test_a_release_that_comes_before_its_lookup_wins() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    with refused(Reason.UNKNOWN_LEASE):
        rig.core.reading.release(session, [LEASE])
    found = rig.lookup(session, keys(0), lease_id=LEASE)
    assert (found.hit_tokens, found.lease_id) == (16, 0)
    assert not found.groups[0].leased.any()
    assert not rig.state.table.refs.any()
    assert rig.lookup(session, keys(0), lease_id=LEASE + 1).lease_id == LEASE + 1


def test_known_leases_end_though_another_id_is_unknown() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    rig.lookup(session, keys(0), lease_id=LEASE)
    with refused(Reason.UNKNOWN_LEASE):
        rig.core.reading.release(session, [99, LEASE])
    assert not rig.state.table.refs.any()


def test_leases_end_with_their_group() -> None:
    rig = Rig()
    reader, writer = rig.attach(engine_id="r"), rig.attach(engine_id="w")
    rig.put(writer, keys(0, 1))
    rig.lookup(reader, keys(0, 1), lease_id=LEASE)
    rig.leave(reader, finished=False)
    assert not rig.state.table.refs.any()
    assert rig.state.books[0].held == 0


def test_touch_and_presence_count_what_is_there() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 2))
    assert rig.core.reading.touch(session, 1, items(keys(0, 1, 2, 2))) == 3
    assert rig.present(session, keys(0, 1, 2)) == [True, False, True]
