"""Extents follow the order of the requested keys, wherever the blocks lie."""

from __future__ import annotations

import random

import pytest
from support.core_kit import Rig, key, keys

ORDERS = {
    "rising": [0, 1, 2, 3, 4, 5],
    "falling": [5, 4, 3, 2, 1, 0],
    "mixed": [2, 0, 1, 5, 3, 4],
    "two swapped": [0, 1, 3, 2, 4, 5],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_neighbours_in_any_order(order: list[int]) -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(*range(8)))
    alone = [rig.head(session, key(number)) for number in range(8)]
    found = rig.lookup(session, keys(*order), lease_id=9)
    assert found.groups[0].extents["slot"].tolist() == [alone[number] for number in order]


def test_all_orders_of_scattered_blocks() -> None:
    rig, rng = Rig(), random.Random(5)
    session = rig.attach()
    numbers = list(range(24))
    rng.shuffle(numbers)
    for start in range(0, 24, 5):
        rig.put(session, keys(*numbers[start : start + 5]))
    alone = [rig.head(session, key(number)) for number in range(24)]
    for _ in range(200):
        order = rng.sample(range(24), rng.randint(2, 12))
        found = rig.lookup(session, keys(*order), lease_id=9)
        extents = found.groups[0].extents
        assert extents["slot"].tolist() == [alone[number] for number in order]
        assert extents["checksum"].tolist() == [
            rig.state.table.checksum[alone[number]].item() for number in order
        ]
        rig.core.reading.release(session, [9])
