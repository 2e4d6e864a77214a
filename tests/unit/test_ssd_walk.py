"""Iteration over all blocks of an SSD tier while it changes."""

from __future__ import annotations

import numpy as np
from support.tiers import NAMESPACE, family, key_of, keys_of

from kvhearth_server.tiers.base import BlockSpec
from kvhearth_server.tiers.ssd.index import ROW_DTYPE, SsdIndex


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
