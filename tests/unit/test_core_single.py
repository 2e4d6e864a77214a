"""Commits and lookups of one key: the fast path leaves the same state as the general path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import (
    Rig,
    contract,
    full,
    key,
    no_deadline,
    window,
)
from support.core_pair import Pair

from kvhearth.model import EXTENT_DTYPE, FLAG_VERIFY
from kvhearth_server.core.fast_path import SingleFastPath

KEYS = 12
PAIR = contract(full(), window(64), full(page_bytes=8192))

ONE = st.integers(0, KEYS - 1).map(lambda number: [number])

op = st.one_of(
    st.tuples(
        st.just("put"),
        ONE,
        st.integers(0, 2),
        st.booleans(),
        st.integers(-1, KEYS),
    ),
    st.tuples(st.just("lookup"), ONE, st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(1, 9)),
    st.tuples(st.just("pin"), st.integers(0, KEYS - 1), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("sum"), st.integers(0, KEYS - 1), st.integers(0, 2)),
    st.just(("bump",)),
)


@no_deadline
@given(st.lists(op, max_size=40))
def test_both_ways_are_one(steps: list[tuple[Any, ...]]) -> None:
    pair = Pair(PAIR, KEYS, 3, slab_bytes=16 * 4096, leases_max=6, leased_slots_max=7)
    for step in steps:
        pair.do(step)


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noted(name: str) -> None:
        whole = getattr(SingleFastPath, name)

        def note(self: SingleFastPath, *args: Any) -> Any:
            answer = whole(self, *args)
            taken.append(f"{name} {answer}")
            return answer

        monkeypatch.setattr(SingleFastPath, name, note)

    noted("commit")
    noted("lookup")
    rig = Rig(1)
    session = rig.attach(contract(full()))
    assert rig.put(session, [key(1)]).tolist() == [True]
    assert rig.put(session, [key(2)], parent=key(1)).tolist() == [True]
    head = rig.head(session, key(2))
    assert rig.state.chains.parent_of(head) == rig.head(session, key(1))
    rig.state.table.flags[head] = FLAG_VERIFY
    found = rig.lookup(session, [key(2)], lease_id=5)
    assert taken == ["commit True", "commit True", f"lookup {head}"]
    (one,) = found.groups
    assert (found.hit_tokens, found.lease_id, one.leased.tolist()) == (16, 5, [True])
    assert (
        one.extents.tobytes()
        == rig.state.table.extents(np.array([head, head]), 4096, summed=True)[:1].tobytes()
    )
    assert one.extents.dtype == EXTENT_DTYPE
    rig.core.reading.release(session, [5])
    assert rig.put(session, [key(1)]).tolist() == [False]
    assert taken[3:] == ["commit False"]
