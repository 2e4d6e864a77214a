"""Blocks that are gone, or replaced, before their actions are performed are not published."""

from __future__ import annotations

import pytest
from support.core_kit import SLOT_BYTES, keys
from support.core_shell import Desk

from kvhearth import native
from kvhearth_server.core.removal import Cause, remove_blocks

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no native module")


@pytest.mark.parametrize("count", [1, 4])
def test_a_block_that_is_removed_in_the_same_call_is_not_published(count: int) -> None:
    desk = Desk(2)
    session, names = desk.attach(), keys(*range(1, count + 1))
    engine, core, namespace = desk.engine, desk.core, desk.space(session)

    def found() -> list[bool]:
        assert engine.shared_index is not None
        table = engine.shared_index.table(0)
        space = table.space(namespace.number, namespace.epoch)
        mask = table.find(space, b"".join(names), 32, SLOT_BYTES).mask
        assert mask is not None
        return [bool(each) for each in mask[:-1]]

    def store_and_remove() -> None:
        item = desk.item(names, *desk.take(session, count))
        core.writing.commit(session, namespace.epoch, [item])
        heads = core.state.index.find(namespace.number, 0, names)
        remove_blocks(core.state, heads[:1], Cause.ASKED)

    engine.call(store_and_remove)
    assert found() == [False] + [True] * (count - 1)
    desk.put(session, names)
    assert found() == [True] * count
