"""Iteration over all blocks of an SSD tier while it changes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from support.tiers import NAMESPACE, Arena, Desk, family, key_of, keys_of, settings

from kvhearth_server.tiers.base import BlockSpec, Done, LoadBatch
from kvhearth_server.tiers.ssd.index import ROW_DTYPE, SsdIndex
from kvhearth_server.tiers.ssd.tier import SsdTier


def whole_round(index: SsdIndex, count: int) -> list[tuple[BlockSpec, bytes]]:
    """Returns all blocks that one round visits."""
    cursor, found = 0, []
    for _ in range(100_000):
        cursor, step = index.walk(cursor, count)
        assert sum(len(keys) for _, keys in step) <= count
        found += [(of, key) for of, keys in step for key in keys]
        if not cursor:
            return found
    raise AssertionError("the round does not end")


def bind(index: SsdIndex, segment: int, numbers: list[int], of: BlockSpec) -> None:
    rows = np.zeros((len(numbers), of.shards), ROW_DTYPE)
    rows["length"], rows["epoch"] = of.length, of.epoch
    index.bind(of.namespace, of.group, keys_of(numbers), segment, rows)


def test_a_round_comes_to_everything_once_and_in_place() -> None:
    index = SsdIndex()
    families = [family(), family(group=1, shards=3), family(epoch=2), family(namespace=bytes(32))]
    at = {of: segment * 100 for segment, of in enumerate(families)}
    wanted: set[tuple[BlockSpec, bytes]] = set()
    for segment in (3, 1, 2):
        for of in families:
            numbers = list(range(at[of], at[of] + 7 * segment))
            at[of] += 7 * segment
            bind(index, segment, numbers, of)
            wanted |= {(of, key) for key in keys_of(numbers)}
    for count in (1, 5, 64, 10_000):
        found = whole_round(index, count)
        assert len(found) == len(wanted)
        assert set(found) == wanted
    entries = [
        int(index.find(of.namespace, of.group, [key])[0]) for of, key in whole_round(index, 1)
    ]
    assert entries == sorted(entries)


def test_an_empty_tier_is_gone_through_at_once() -> None:
    assert SsdIndex().walk(0, 10) == (0, [])


def test_dead_rows_are_passed_over_a_bounded_number_at_a_time() -> None:
    index = SsdIndex()
    numbers = list(range(40_000))
    bind(index, 1, numbers, family())
    index.unbind(NAMESPACE, 0, keys_of(numbers[:-1]))
    cursor, found = index.walk(0, 10)
    assert cursor
    assert not found
    assert index.walk(cursor, 10) == (0, [(family(), [key_of(39_999)])])


def test_what_stays_comes_in_a_round_whatever_comes_and_goes() -> None:
    seed = random.Random(7)
    index = SsdIndex()
    for segment in range(1, 11):
        bind(index, segment, list(range(segment * 100, segment * 100 + 100)), family())
    stays = {key_of(number) for number in range(100, 1100, 3)}
    cursor, found, fresh = 0, set[bytes](), 5000
    for _ in range(1000):
        cursor, step = index.walk(cursor, 7)
        found |= {key for _, keys in step for key in keys}
        if not cursor:
            break
        gone = [key_of(seed.randrange(100, 1100)) for _ in range(5)]
        index.unbind(NAMESPACE, 0, [key for key in gone if key not in stays])
        bind(index, seed.randrange(1, 14), [fresh], family())
        fresh += 1
    assert not cursor
    assert found >= stays


def test_all_that_a_walk_names_can_be_loaded(tmp_path: Path) -> None:
    arena = Arena()
    desk = Desk(SsdTier(settings(tmp_path / "one"), [arena.bytes]), arena)
    desk.settle()
    two = family(group=1, shards=2)
    desk.store_all(range(60))
    desk.store_all(range(20), two)
    cursor, loaded = 0, 0
    while True:
        cursor, step = desk.tier.walk(cursor, 16)
        for of, keys in step:
            places = arena.places(arena.slots, len(keys), of.shards)
            done = desk.wait(desk.tier.submit_load(LoadBatch(of, keys, places)))
            loaded += len(done.rows(Done))
        if not cursor:
            break
    assert loaded == 80
    desk.tier.close()


def test_a_namespace_is_forgotten_in_portions_and_no_other() -> None:
    index = SsdIndex()
    families = [family(), family(group=1, shards=3), family(namespace=bytes(32))]
    for segment in (1, 2):
        for place, of in enumerate(families):
            first = 1000 * place + 100 * segment
            bind(index, segment, list(range(first, first + 40)), of)
    gone: set[tuple[int, bytes]] = set()
    while (found := index.forget_of(families[0].namespace, 7)) is not None:
        assert 0 < len(found.keys) <= 7
        gone |= {(found.group, key) for key in found.keys}
        index.check()
    assert len(gone) == 160
    assert len(index) == 80
    assert {of for of, _ in whole_round(index, 64)} == {families[2]}
    assert index.forget_of(b"\xff" * 32, 7) is None
