"""Searches for the end of what a remote has of a window, by core's own rule of a hit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import full, key, keys, window
from support.tiers import family

from kvhearth_server.core.lookup import hit_blocks, usable_boundaries
from kvhearth_server.tiers.base import Counts, Done, Missing
from kvhearth_server.tiers.remote.existence import (
    CALL_KEYS,
    YES,
    ExistenceCache,
    Searches,
    cuts,
    unknown_of_window,
)
from kvhearth_server.tiers.remote.mover import Answer, Exists

SPEC = window(1024)
WIDTH = hit_blocks(SPEC)


@st.composite
def _runs(draw: st.DrawFn) -> tuple[int, int, int]:
    """Length of a chain, and the first and last block, plus one, that a remote has of it."""
    count = draw(st.integers(1, 512))
    end = draw(st.integers(0, count))
    first = draw(st.integers(0, max(0, end - WIDTH)))
    return count, first, end


@given(_runs())
def test_the_end_of_a_window_is_found(run: tuple[int, int, int]) -> None:
    count, first, end = run
    there, calls = {key(row) for row in range(first, end)}, list[int]()

    def submit(request: Exists, ended: Callable[[Answer], None]) -> bool:
        calls.append(len(request.keys))
        ended(Answer(1, [Done() if each in there else Missing() for each in request.keys]))
        return True

    cache, names = ExistenceCache(1 << 12), keys(*range(count))
    searches = Searches(cache, Counts(), submit, lambda: 0.0)
    assert searches.begin(Exists("0" * 32, family(), keys(*range(count))), names, WIDTH)
    assert len(searches) == 0
    assert len(calls) <= 3
    assert max(calls) <= CALL_KEYS
    states = cache.look(names, 0.0)
    low, high = unknown_of_window(states)
    assert low >= high, "nothing more has to be asked"
    found = np.flatnonzero(states == YES)
    if end - first < 64 and end < count:
        return  # narrower than the first call's steps: it may be missed, and is never made up
    assert len(found) == min(WIDTH, end)
    if end:
        assert found[-1] == end - 1
        assert usable_boundaries(SPEC, states == YES)[end], "core can hit up to there"


def test_the_blocks_that_a_hit_needs() -> None:
    assert (hit_blocks(full()), hit_blocks(window(64)), hit_blocks(window(1))) == (0, 4, 1)


@given(st.integers(0, 600), st.integers(1, 600))
def test_cuts_of_a_window_include_the_last_row(low: int, size: int) -> None:
    rows = cuts(low, low + size, last=True)
    assert rows[-1] == low + size - 1
    assert len(rows) == len(set(rows)) == min(CALL_KEYS, size)
    assert low <= rows[0]
