"""The SSD tier's pure parts: index, admission, budget, sizes, health, estimates."""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tiers import NAMESPACE, key_of, keys_of

from kvhearth.model import Records
from kvhearth_server.tiers.base import (
    Counts,
    Kind,
)
from kvhearth_server.tiers.ssd.directory import DirectoryHealth
from kvhearth_server.tiers.ssd.index import ROW_DTYPE, KeyMap, SsdIndex
from kvhearth_server.tiers.ssd.settings import (
    MIB,
    SsdDirectorySpec,
    SsdSettings,
    segment_bytes_for,
    segment_cost_bytes,
    segments_max,
)
from kvhearth_server.tiers.ssd.write_limits import SeenTwice, WriteBudget

GIB = 1 << 30


def rows(count: int, shards: int, length: int = 100) -> Records:
    found = np.zeros((count, shards), ROW_DTYPE)
    found["length"] = length
    return found


def test_the_index_agrees_with_a_dict() -> None:
    """Compares random binds, unbinds and forgotten segments with a plain model."""
    seed = random.Random(11)
    index, model = SsdIndex(), dict[tuple[int, bytes], int]()
    hot = 0
    for step in range(400):
        group, shards = seed.randrange(2), seed.choice([1, 1, 3])
        names = [key_of(seed.randrange(60)) for _ in range(seed.randrange(1, 9))]
        what = seed.random()
        segment = step // 20
        if what < 0.6:
            index.bind(NAMESPACE, group, names, segment, rows(len(names), shards))
            model |= {(group, key): segment for key in names}
        elif what < 0.9:
            gone = {(group, key) for key in names} & set(model)
            assert index.unbind(NAMESPACE, group, names) == len(gone)
            for name in gone:
                del model[name]
        else:
            old = seed.randrange(segment + 1)
            reported = set[tuple[int, bytes]]()
            while gone_now := index.forget_some(old, seed.randrange(1, 4)):
                reported |= {(e.group, k) for e in gone_now for k in e.keys}
                index.check()
            assert old not in index.segments
            assert reported == {name for name, where in model.items() if where == old}
            model = {name: where for name, where in model.items() if where != old}
        entries = index.find(NAMESPACE, group, names)
        # Some names occur twice: the pages of a hot block still count once.
        index.used(np.repeat(entries[entries >= 0], seed.randrange(1, 3)))
        index.check()
        hot = max(hot, sum(each.hot_pages for each in index.segments.values()))
        assert len(index) == len(model)
    assert hot > 20
    for group in (0, 1):
        entries = index.find(NAMESPACE, group, keys_of(range(60)))
        for number, entry in enumerate(entries.tolist()):
            assert (entry >> 32 if entry >= 0 else -1) == model.get((group, key_of(number)), -1)


def test_one_key_twice_in_a_call_is_the_later_one() -> None:
    index = SsdIndex()
    found = rows(3, 1)
    found["sequence"] = [[1], [2], [3]]
    index.bind(NAMESPACE, 0, [b"a", b"b", b"a"], 5, found)
    index.check()
    entries = index.find(NAMESPACE, 0, [b"a", b"b"])
    assert index.heads(entries)["sequence"].tolist() == [3, 2]
    assert index.live_bytes == 200


def test_dicts_do_not_grow_at_the_same_time() -> None:
    """Thirty-two dicts of one size all grew within a few calls, each growth stalling its call."""
    found, keys = KeyMap(), keys_of(range(400_000))
    sizes, most = [0] * len(found._parts), 0
    for start in range(0, len(keys), 1000):
        assert found.add(keys[start : start + 1000], range(start, start + 1000))
        now = [sys.getsizeof(part) for part in found._parts]
        pairs = zip(found._parts, sizes, now, strict=True)
        grown = sum(len(part) for part, before, after in pairs if after > before)
        most, sizes = max(most, grown), now
    assert most < 20_000


def test_a_list_of_keys_is_cut_also_within_a_part() -> None:
    found, keys = KeyMap(), keys_of(range(100_000))
    found.add(keys, range(len(keys)))
    assert max(map(len, found._parts)) > 400
    listed, place = list[bytes](), 0
    while place >= 0:
        some, place = found.list_parts(place, 300)
        assert 0 < len(some) <= 300
        listed += some
    assert sorted(listed) == sorted(keys)


def test_the_collector_does_not_go_through_keys() -> None:
    index = SsdIndex()
    index.bind(NAMESPACE, 0, keys_of(range(1000)), 1, rows(1000, 1))
    table = index.segments[1]
    assert not gc.is_tracked(table.keys)
    assert not any(gc.is_tracked(part) for part in index._maps[0, 0]._parts)


def test_seen_twice_lets_in_at_the_second_offer() -> None:
    rule = SeenTwice(remembered=4)
    keys = keys_of(range(4))
    assert rule.admit(NAMESPACE, 0, keys).tolist() == [False] * 4
    assert rule.admit(NAMESPACE, 1, keys[:1]).tolist() == [False], "another group"
    assert rule.admit(NAMESPACE, 0, keys[:2]).tolist() == [True, True]
    # Bounded: blocks offered long ago are forgotten.
    rule.admit(NAMESPACE, 0, keys_of(range(100, 120)))
    assert rule.admit(NAMESPACE, 0, keys[3:]).tolist() == [False]


def test_what_cannot_be_refused_is_paid_by_what_can() -> None:
    budget = WriteBudget(24_000, Counts(), 0.0)
    assert budget.has(100, 0.0)
    assert not budget.has(101, 0.0)
    assert budget.take(30, 9, 0.0) == 4, "the last overdraws it"
    budget.give_back(20)
    assert budget.left(0.0) == 0
    budget.spend(500, 0.0)
    assert (budget.left(0.0), budget.take(30, 9, 0.0)) == (-500, 0)
    assert budget.left(3600.0) == pytest.approx(500)
    assert WriteBudget(0, Counts(), 0.0).has(1 << 60, 0.0)


@pytest.mark.parametrize("capacity", [GIB, 10 * GIB, 100 * GIB, 1000 * GIB, 100_000 * GIB])
def test_segments_fit_into_the_capacity(capacity: int) -> None:
    size = segment_bytes_for(capacity)
    count = segments_max(capacity, size)
    assert 4 <= count <= 1024
    assert count * segment_cost_bytes(size) <= capacity
    assert count * size >= 0.9 * capacity or size == 64 * MIB


def test_a_directory_is_named_once() -> None:
    place = SsdDirectorySpec(Path("one"), GIB)
    with pytest.raises(ValueError, match="named twice"):
        SsdSettings((place, place))


def test_pauses_after_failed_writes_grow_and_end() -> None:
    health = DirectoryHealth("d")
    now, pauses = 0.0, []
    for _ in range(8):
        health.write_failed("io", now)
        assert not health.may_write(now)
        pauses.append(health.retry_after_s(now))
        health.write_failed("io", now)  # a write that was in flight does not make the pause longer
        now += pauses[-1]
        assert health.may_write(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert health.problems(now) == {
        Kind("d", "io", "writes"): "d: writes: its device reports I/O errors"
    }
    health.write_done()
    assert health.problems(now) == {}
