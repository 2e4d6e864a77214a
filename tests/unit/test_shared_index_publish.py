"""Blocks that are gone, or replaced, before their actions are performed are not published."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_kit import SLAB_BYTES, SLOT_BYTES, contract, full, keys
from support.core_shell import Shell

from kvhearth import native
from kvhearth_server.core.removal import Cause, remove_blocks
from kvhearth_server.core.reservations import CommitItem
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no native module")


@pytest.mark.parametrize("count", [1, 4])
def test_a_block_that_is_removed_in_the_same_call_is_not_published(count: int) -> None:
    shell = Shell(Geometry.of([("t", 2 * SLAB_BYTES)], SLAB_BYTES, SLOT_BYTES), Limits())
    attached = shell.attach(contract(full()), "t")
    session, engine = attached.session.number, shell.engine
    state, names = engine.core.state, keys(*range(1, count + 1))
    (namespace,) = state.namespaces

    def found() -> list[bool]:
        assert engine.shared_index is not None
        table = engine.shared_index.table(0)
        space = table.space(namespace.number, namespace.epoch)
        mask = table.find(space, b"".join(names), 32, SLOT_BYTES).mask
        assert mask is not None
        return [bool(each) for each in mask[:-1]]

    def store(number: int) -> None:
        taken = engine.core.writing.reserve(session, number, namespace.epoch, [(0, count)])
        slots, generations = taken.handed[0].slots, taken.handed[0].generations
        sums = np.zeros((*slots.shape, 16), np.uint8)
        item = CommitItem(0, names, slots, generations, sums, b"")
        engine.core.writing.commit(session, namespace.epoch, [item])

    def store_and_remove() -> None:
        store(1)
        heads = state.index.find(namespace.number, 0, names)
        remove_blocks(state, heads[:1], Cause.ASKED)

    engine.call(store_and_remove)
    assert found() == [False] + [True] * (count - 1)
    engine.call(store, 2)
    assert found() == [True] * count
