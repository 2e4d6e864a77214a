"""Lookups and leases: the restorable part of a request, and what holding it costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.core_kit import Rig, full, key, keys, mamba, no_deadline, refused, window
from support.core_model import longest_hit, needed_blocks

from kvhearth.contract import GroupSpec
from kvhearth.errors import Reason
from kvhearth.model import FLAG_SUMMED, Tier
from kvhearth_server.core.lookup import (
    KeysItem,
    blocks_needed,
    hit_boundaries,
    usable_boundaries,
)

LEASE = 7


def flags(text: str) -> np.ndarray:
    """Parse ``"xx.x"`` into booleans."""
    return np.array([letter == "x" for letter in text], np.bool_)


def test_the_boundaries_up_to_which_a_group_can_be_restored() -> None:
    """16 tokens a block. With a window of 33 tokens the next token sees the 32 before it."""
    for spec, ready, wanted in (
        (full(), "xx.x", [0, 1, 2]),
        (mamba(), "..x.x", [0, 3, 5]),  # the state at the boundary is enough
        (window(33), "..xx.xxx", [0, 4, 7, 8]),
        (window(34), "..xx.xxx", [0, 8]),  # a third block, if only for its last token
        (window(1), "....", [0, 1, 2, 3, 4]),  # a token sees itself
        (window(1 << 30), "xx.x", [0, 1, 2]),
    ):
        found = np.flatnonzero(usable_boundaries(spec, flags(ready))).tolist()
        assert found == wanted, (spec, ready)


@pytest.mark.parametrize("ready", ["", "xx"])
def test_block_sizes_without_a_common_multiple_in_64_bits(ready: str) -> None:
    groups = [full(block_tokens=(1 << 20) - step) for step in (1, 3, 5, 7, 9)]
    assert not hit_boundaries([(spec, flags(ready)) for spec in groups]).any()


sizes = st.integers(1, 4)
specs = st.one_of(
    sizes.map(lambda size: full(block_tokens=size)),
    sizes.map(lambda size: mamba(block_tokens=size)),
    st.tuples(sizes, st.integers(1, 20)).map(lambda p: window(p[1], block_tokens=p[0])),
)
groups_of_flags = st.lists(
    st.tuples(specs, st.lists(st.sampled_from([True, True, True, False]), max_size=12)),
    min_size=1,
    max_size=3,
)


@no_deadline
@given(groups=groups_of_flags)
@example(groups=[(window(5, block_tokens=2), [False, True, True])])
@example(groups=[])
def test_against_trying_every_length(groups: list[tuple[GroupSpec, list[bool]]]) -> None:
    arrays = [(spec, np.array(ready, np.bool_)) for spec, ready in groups]
    found = hit_boundaries(arrays)
    assert (int(found[0]) if len(found) else 0) == longest_hit(groups)
    assert found.tolist() == sorted(set(found.tolist()), reverse=True)
    for tokens in found.tolist():
        # Truncated to that length, the groups have that length as their longest hit.
        cut = [(spec, ready[: tokens // spec.block_tokens]) for spec, ready in groups]
        assert longest_hit(cut) == tokens
        for spec, ready in groups:
            need = blocks_needed(spec, tokens)
            assert set(range(need.start, need.stop)) == needed_blocks(spec, tokens)
            assert all(ready[need])


# -- through the core ------------------------------------------------------------------------------


def test_the_answer_for_each_key() -> None:
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


def test_the_cap_on_held_bytes_shortens_a_hit() -> None:
    rig = Rig(1, held_fraction_max=0.5)
    session = rig.attach()
    for number in range(0, 12, 4):
        rig.put(session, keys(*range(number, number + 4)))
    # Blocks that are already held do not count again.
    for lease_id in (LEASE, LEASE + 1):
        found = rig.lookup(session, keys(*range(12)), lease_id=lease_id)
        assert (found.hit_tokens, found.short) == (8 * 16, Reason.HELD_CAP)
        assert found.groups[0].leased.sum() == 8
    assert rig.lookup(session, keys(*range(12))).hit_tokens == 12 * 16  # without a lease
    with refused(Reason.HELD_CAP):
        rig.reserve(session, 1)
    rig.release(session, LEASE, LEASE + 1)
    assert rig.reserve(session, 1).short is None


def test_known_leases_end_though_another_id_is_unknown() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    rig.lookup(session, keys(0), lease_id=LEASE)
    with refused(Reason.UNKNOWN_LEASE):
        rig.release(session, 99, LEASE)
    assert not rig.state.table.refs.any()


def test_the_bound_on_leased_slots_is_a_tenants() -> None:
    rig = Rig(tenants=("t", "u"), leased_slots_max=4)
    mine, theirs = rig.attach(), rig.attach(tenant="u")
    for session in (mine, theirs):
        rig.put(session, keys(*range(4)))
        rig.lookup(session, keys(*range(4)), lease_id=1)
    with refused(Reason.TOO_MANY_LEASES):
        rig.lookup(mine, keys(0), lease_id=2)
    # A block that is removed under its readers stays held until they release it.
    rig.remove_bad(rig.head(mine, key(3)))
    assert rig.state.books[0].leased_slots == 4
    rig.leave(mine)
    assert rig.state.books[0].leased_slots == 0


@pytest.mark.parametrize("asked", [(0, 1, 2), (0, 1, 9)], ids=["all there", "one not"])
def test_a_lease_that_is_over_is_counted_and_holds_nothing(asked: tuple[int, ...]) -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1, 2))
    item, epoch = KeysItem(0, keys(*asked)), rig.epoch(session)
    counted = []
    for lease_id, released in ((1, False), (0, True), (0, False)):
        rig.state.take_counts()
        rig.core.reading.lookup(session, epoch, [item], lease_id, released=released)
        rig.core.reading.release(session, [1] if lease_id else [])
        counted.append(rig.state.take_counts().get(("leased_bytes", ""), 0))
        assert not rig.state.books[0].leased_slots
    assert counted[0] == counted[1] > counted[2] == 0
