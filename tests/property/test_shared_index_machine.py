"""The shared index against the core's: after each step of random clients, and after each death of
the daemon, every table finds exactly the blocks that the core would serve, with the same extents.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis.stateful import invariant, precondition
from support.core_kit import key
from support.machine_base import KEYS, run_machine
from support.machine_reads import ReadingRules
from support.machine_refusals import RefusalRules
from support.machine_writes import WritingRules

from kvhearth import native
from kvhearth.contract import GroupSpec
from kvhearth.model import EXTENT_DTYPE
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no native module")
UNIVERSE = [key(number) for number in range(KEYS)]


class SharedIndexMachine(WritingRules, ReadingRules, RefusalRules):
    """The core's machine, whose daemon shares its index."""

    @precondition(lambda self: self.started)
    @invariant()
    def the_tables_are_the_index(self) -> None:
        for namespace in self.shell.engine.core.state.namespaces:
            for number, spec in enumerate(namespace.contract.groups):
                self._compare_table(namespace, number, spec)

    def _compare_table(self, namespace: Namespace, number: int, spec: GroupSpec) -> None:
        engine = self.shell.engine
        state, index = engine.core.state, engine.shared_index
        assert index is not None
        heads = state.index.find(namespace.number, number, UNIVERSE)
        served = (heads >= 0) & (state.table.epoch[heads] == namespace.epoch)
        served &= state.table.state[heads] == State.SUMMED
        table = index.table(state.segment_of[namespace.tenant])
        space = table.space(namespace.number, namespace.epoch)
        assert space
        assert not table.space(namespace.number, namespace.epoch - 1)
        seen = table.find(space + number, b"".join(UNIVERSE), 32, spec.page_bytes, spec.shards)
        assert seen.mask is not None
        assert seen.hits == np.count_nonzero(served)
        assert np.frombuffer(seen.mask[:-1], np.bool_).tolist() == served.tolist()
        extents = np.frombuffer(seen.extents[:-1], EXTENT_DTYPE).reshape(KEYS, spec.shards)
        slots = state.table.all_shards(heads[served], spec.shards)
        wanted = state.table.extents(slots, spec.page_bytes, summed=True)
        got = extents[served].reshape(-1)
        wanted["flags"] |= got["flags"]  # a table may ask for one more verification
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("number", range(4))
def test_the_tables_against_the_core(number: int) -> None:
    run_machine(SharedIndexMachine, number, examples=8, steps=40)
