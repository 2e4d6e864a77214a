"""The table of the shared index: it finds what was put, and nothing else, whatever it holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import no_deadline
from support.table_rig import FIRST, PAGE, SPACE, Rig, names

from kvhearth import native
from kvhearth.model import EXTENT_DTYPE

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no native module")


@pytest.mark.parametrize(
    ("shards", "scattered", "width"), [(1, False, 16), (1, True, 32), (2, True, 24), (8, False, 32)]
)
def test_all_that_is_put_is_found(shards: int, scattered: bool, width: int) -> None:
    rig, count = Rig(4096), 4096 // shards
    order = np.arange(4096)
    if scattered:
        np.random.default_rng(1).shuffle(order)
    slots = order.reshape(count, shards).tolist()
    keys = names(count, width=width)
    assert rig.put(keys, slots, width=width) == count
    assert rig.table.unplaced_count == 0
    found, extents = rig.find(keys, shards=shards, width=width)
    assert found.all()
    assert (extents["slot"] == np.array(slots) + FIRST).all()
    assert (extents["offset"] == np.array(slots) * PAGE).all()
    assert (extents["segment"] == 3).all()
    assert (extents["length"] == PAGE).all()
    assert (extents["flags"] == 1).all()
    sums = extents["checksum"].tobytes()
    assert sums == b"".join(key[:16] * shards for key in keys)
    assert not rig.find(names(count, count, width), shards=shards, width=width)[0].any()
    assert not rig.find(keys, shards=shards, width=width, space=SPACE + 1)[0].any()


def test_without_a_mask_the_search_ends_at_the_first_hole() -> None:
    rig, keys = Rig(256), names(200)
    rig.put(keys, [[number] for number in range(200)])
    asked = [*keys[:150], b"?" * 32, *keys[150:]]
    seen = rig.table.find(SPACE, b"".join(asked), 32, PAGE, every=False)
    assert (seen.hits, seen.mask, seen.doubtful) == (150, None, False)
    assert not np.frombuffer(seen.extents[:-1], EXTENT_DTYPE)["length"][150:].any()
    found, _ = rig.find(asked)
    assert np.flatnonzero(~found).tolist() == [150]


def test_a_new_generation_voids_an_entry_and_a_new_put_renews_it() -> None:
    rig, keys = Rig(64), names(8)
    rig.put(keys, [[number] for number in range(8)])
    _, before = rig.find(keys)
    assert rig.table.intact(before)
    rig.generations[FIRST + 3] += 1
    assert not rig.table.intact(before)
    assert rig.table.intact(before[:3])
    assert np.flatnonzero(~rig.find(keys)[0]).tolist() == [3]
    rig.put(names(1, 50), [[3]])
    found, extents = rig.find([*keys, *names(1, 50)])
    assert np.flatnonzero(~found).tolist() == [3]
    assert extents["slot"][8] == FIRST + 3
    assert extents["generation"][8] == 1
    rig.put([keys[3]], [[20]])
    assert rig.find(keys)[1]["slot"][3] == FIRST + 20


def test_one_shard_of_a_later_life_voids_the_block() -> None:
    rig, keys = Rig(64), names(4)
    rig.put(keys, [[3 * number, 3 * number + 2] for number in range(4)])
    assert rig.find(keys, shards=2)[0].all()
    rig.generations[FIRST + 5] += 1
    assert rig.find(keys, shards=2)[0].tolist() == [True, False, True, True]


def test_an_entry_whose_writer_never_ended_is_given_up_and_can_be_written_again() -> None:
    rig, keys = Rig(64), names(8)
    rig.put(keys, [[number] for number in range(8)])
    rig.table.entries[5, 0] |= np.uint64(1)
    found, _ = rig.find(keys)
    assert np.flatnonzero(~found).tolist() == [5]
    # Only the daemon can tell whether it is there; the others are certain.
    for every, asked, certain in (
        (True, keys, False),
        (False, keys, False),
        (True, keys[:5], True),
        (True, [keys[0], b"?" * 32], True),
    ):
        seen = rig.table.find(SPACE, b"".join(asked), 32, PAGE, every=every)
        assert seen.doubtful is not certain
    rig.put([keys[5]], [[5]])
    assert rig.find(keys)[0].all()
    assert not rig.table.find(SPACE, b"".join(keys), 32, PAGE).doubtful


def test_flags_ask_for_verification() -> None:
    rig, keys = Rig(64), names(2)
    rig.flags[FIRST + 1] = 2
    rig.put(keys, [[0], [1]])
    assert rig.find(keys)[1]["flags"].reshape(-1).tolist() == [1, 3]


def test_the_same_block_in_ever_new_slots_always_finds_room() -> None:
    rig, (key,) = Rig(64), names(1)
    for slot in range(64):
        assert rig.put([key], [[slot]]) == 1
        found, extents = rig.find([key])
        assert found.all()
        rig.generations[extents["slot"][0, 0]] += 1
    assert not rig.find([key])[0].any()


def test_a_row_names_its_epoch() -> None:
    table = Rig(64).table
    assert table.space(9, 0) == 0
    table.use(9, 4, 77)
    assert [table.space(9, epoch) for epoch in (3, 4, 5)] == [0, 77, 0]
    table.use(9, 5, 78)
    assert [table.space(9, epoch) for epoch in (4, 5)] == [0, 78]


@no_deadline
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 20), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=200
    )
)
def test_whatever_memory_holds_no_place_outside_the_segment_is_told(
    damage: list[tuple[int, int]],
) -> None:
    rig = Rig(128)
    keys = names(60)
    rig.put(keys, [[2 * number, 2 * number + 1] for number in range(60)])
    words = rig.memory.view(np.uint64)
    used = len(words) - (1 << 16)  # behind the rows
    for place, value in damage:
        words[(1 << 16) + place % used] = value
    found, extents = rig.find(keys, shards=2)
    seen = extents[found].reshape(-1)
    assert (seen["slot"] >= FIRST).all()
    assert (seen["slot"] < FIRST + 128).all()
    assert (seen["offset"] + PAGE <= 128 * PAGE).all()
