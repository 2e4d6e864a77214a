"""Lookups that find all their keys: the short way leaves the same state as the general one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import Rig, contract, full, key, keys, mamba, no_deadline, window
from support.core_pair import Pair

from kvhearth.model import FLAG_VERIFY
from kvhearth_server.core.table import numbers, rising
from kvhearth_server.core.whole import Whole, Wholes

KEYS = 24
GROUPS = contract(full(), window(64), full(page_bytes=8192))
BLOCKS = 8

run = st.tuples(st.integers(0, KEYS - 2), st.integers(2, 12)).map(
    lambda pair: list(range(pair[0], min(pair[0] + pair[1], KEYS)))
)
mixed = st.lists(st.integers(0, KEYS - 1), min_size=2, max_size=8)
shuffled = run.flatmap(st.permutations)
some = st.one_of(run, run, shuffled, mixed, mixed.map(sorted))
group = st.integers(0, 2)

op = st.one_of(
    st.tuples(
        st.just("put"),
        run.map(lambda numbers: numbers[:BLOCKS]),
        group,
        st.booleans(),
        st.integers(-1, KEYS - 1),
    ),
    st.tuples(st.just("lookup"), some, group, st.integers(0, 9)),
    *[st.tuples(st.just("lookup"), some, st.just(0), st.integers(1, 9))] * 5,
    *[st.tuples(st.just("release"), st.integers(1, 9))] * 2,
    st.tuples(st.just("pin"), st.integers(0, KEYS - 1), group, st.integers(1, 5)),
    st.tuples(st.just("sum"), st.integers(0, KEYS - 1), group),
    st.just(("bump",)),
)


@no_deadline
@given(st.lists(op, max_size=40), st.sampled_from([0.3, 1.0]))
def test_both_ways_are_one(steps: list[tuple[Any, ...]], held: float) -> None:
    # Slabs of fewer slots than most runs have keys, so that a run crosses them.
    bounds: dict[str, Any] = {"leases_max": 6, "leased_slots_max": 40, "held_fraction_max": held}
    pair = Pair(GROUPS, KEYS, 8, slab_bytes=8 * 4096, **bounds)
    first = [("put", list(range(at, at + BLOCKS)), 0, True, at - 1) for at in (0, 8, 16)]
    for step in [*first, *steps]:
        pair.do(step)


def taken(monkeypatch: pytest.MonkeyPatch) -> list[Whole | None]:
    """What the short way answers from now on."""
    answers: list[Whole | None] = []
    lookup = Wholes.lookup

    def note(self: Wholes, *args: Any) -> Whole | None:
        answers.append(lookup(self, *args))
        return answers[-1]

    monkeypatch.setattr(Wholes, "lookup", note)
    return answers


def test_it_is_taken_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = taken(monkeypatch)
    rig = Rig(1)
    session = rig.attach(contract(full()))
    assert rig.put(session, keys(1, 2, 3, 4)).tolist() == [True] * 4
    rig.state.table.flags[rig.head(session, key(3))] = FLAG_VERIFY
    heads = [rig.head(session, key(number)) for number in (1, 2, 3, 4)]
    found = rig.lookup(session, keys(1, 2, 3, 4), lease_id=5)
    (one,) = found.groups
    assert answers[0] is not None
    assert (found.lease_id, found.hit_tokens, one.leased.tolist()) == (5, 64, [True] * 4)
    expected = rig.state.table.extents(np.array(heads), 4096, summed=True)
    assert one.extents.tobytes() == expected.tobytes()
    assert rig.group(session).leases[5].tolist() == sorted(heads)
    # In another order than in memory the extents follow the keys.
    found = rig.lookup(session, keys(4, 1), lease_id=6)
    assert answers[1] is not None
    assert found.groups[0].extents["slot"].tolist() == [heads[3], heads[0]]
    found = rig.lookup(session, keys(2, 3, 1), lease_id=7)
    assert answers[2] is not None
    assert found.groups[0].extents["slot"].tolist() == [heads[1], heads[2], heads[0]]
    rig.core.reading.release(session, [5, 6, 7])
    rig.check()


def test_what_is_not_whole_goes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = taken(monkeypatch)
    rig = Rig(4)
    session = rig.attach(contract(full(), mamba()))
    rig.put(session, keys(1, 2, 3))
    rig.put(session, keys(1, 2, 3), kv_group=1)
    for named, kv_group in (
        (keys(1, 2, 9), 0),  # one is missing
        (keys(1, 2, 1), 0),  # one is asked for twice
        (keys(1, 2, 3), 1),  # another kind of group
    ):
        rig.lookup(session, named, kv_group=kv_group, lease_id=7)
        assert answers == [None]
        answers.clear()
        rig.core.reading.release(session, [7])
        rig.check()


def test_rows_that_lie_side_by_side_are_a_slice() -> None:
    for slots, wanted in (
        ([5], slice(5, 6)),
        ([5, 6, 7], slice(5, 8)),
        ([5, 7], None),
        ([], None),
    ):
        array = np.array(slots, np.int64)
        rows = rising(array)
        assert rows == wanted if wanted is not None else rows is array
        assert numbers(rows).tolist() == slots
