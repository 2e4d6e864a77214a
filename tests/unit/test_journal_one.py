"""The header of one slot, packed at once instead of field by field."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_shell import FakeFile

from kvhearth_server.core.actions import Bind, BindOne, Mark
from kvhearth_server.core.slot_table import Geometry, SlotTable, State
from kvhearth_server.memory.journal import STATE_WORDS, Journal, identity_check, journal_bytes


@pytest.mark.parametrize("state", [State.COMMITTED, State.SUMMED])
def test_one_header_is_written_as_many_are(state: State) -> None:
    written = []
    for one_by_one in (True, False):
        geometry = Geometry.of([("t", 1 << 16)], 1 << 16, 4096)
        table = SlotTable(geometry, np.arange(16, dtype=np.uint32))
        table.checksum.view(np.uint8)[:] = np.arange(256)
        file = FakeFile(journal_bytes(geometry, 1))
        journal = Journal(file, geometry, table)  # type: ignore[arg-type]
        owner = Mark(np.array([5, 9]), State.RESERVED, 77)
        journal.mark(owner)
        for slot, parent, named in ((9, -1, b"k" * 17), (5, 9, b"l" * 64)):
            numbers = np.array([[slot]]), np.array([slot * 1000]), np.array([parent])
            bind = Bind(*numbers, 4096, [named], 3, 2, 9, state)
            one = BindOne(slot, slot, slot * 1000, parent, 4096, named, 3, 2, 9, state)
            assert repr(one.whole()) == repr(bind)
            if one_by_one:
                journal.bind_one(one)
            else:
                journal.bind(bind)
        written.append(file.view.tobytes())
    assert written[0] == written[1]
    header = journal.headers[5]
    assert header["parent_sequence"] == 9000
    assert identity_check(journal.headers[5:6]) == header["identity_check"]
    assert header["state"] == STATE_WORDS[state]
