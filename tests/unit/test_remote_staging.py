"""Places in staging memory against a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth_server.tiers.remote.staging import PAGE_BYTES, Staging

PAGES = 32


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5 * PAGE_BYTES), st.booleans())))
def test_ranges_do_not_overlap_and_come_back(steps: list[tuple[int, int, bool]]) -> None:
    staging = Staging(PAGES * PAGE_BYTES + 5)
    lent: list[tuple[list[int], int]] = []
    for count, size, back in steps:
        if back and lent:
            staging.give(*lent.pop(count % len(lent)))
        elif (taken := staging.take(count, size)) is not None:
            assert len(taken) == count
            lent.append((taken, size))
        used = set[int]()
        for offsets, each in lent:
            pages = -(-each // PAGE_BYTES)
            for offset in offsets:
                fresh = set(range(offset // PAGE_BYTES, offset // PAGE_BYTES + pages))
                assert not used & fresh
                used |= fresh
        assert used <= set(range(PAGES))
        assert staging.free_bytes == (PAGES - len(used)) * PAGE_BYTES
    for offsets, each in lent:
        staging.give(offsets, each)
    whole = staging.take(1, PAGES * PAGE_BYTES)
    assert whole == [0]
