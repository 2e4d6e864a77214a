"""Places in staging memory against a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth_server.tiers.remote.process import Staging

SIZE = 32


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans())))
def test_ranges_do_not_overlap_and_come_back(steps: list[tuple[int, bool]]) -> None:
    staging = Staging(SIZE)
    lent: dict[int, int] = {}
    for size, back in steps:
        used = {at for start, each in lent.items() for at in range(start, start + each)}
        assert len(used) == sum(lent.values()), "two have one place"
        assert used <= set(range(SIZE))
        assert staging.free_bytes == SIZE - len(used)
        if back and lent:
            start = sorted(lent)[size % len(lent)]
            staging.give(start)
            del lent[start]
        elif (taken := staging.take(size)) is not None:
            lent[taken] = size
        else:
            room = [used.isdisjoint(range(at, at + size)) for at in range(SIZE - size + 1)]
            assert not any(room)
    for start in lent:
        staging.give(start)
    assert staging.take(SIZE) == 0
