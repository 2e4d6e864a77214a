"""Lookups that find all their keys, commits of one, leases that end: the fast paths leave the same
state as the general path.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_kit import Rig, contract, full, key, keys, mamba, no_deadline, window
from support.core_model import snapshot

from kvhearth.errors import KVHearthError
from kvhearth.model import EXTENT_DTYPE, FLAG_VERIFY, unpack_bits
from kvhearth.proto.v1 import cache_pb2
from kvhearth_server.core import holds as holding
from kvhearth_server.core.actions import BindOne
from kvhearth_server.core.lookup import Found, PrefixFastPath, Presence
from kvhearth_server.core.slot_rings import FREQ_MAX, PolicyArrays
from kvhearth_server.core.slot_table import Pick, State, ascending, numbers
from kvhearth_server.core.state import CoreState
from kvhearth_server.transport.messages import add_presence

KEYS = 24
GROUPS = contract(full(), window(64), full(page_bytes=8192))
BLOCKS = 8

run = st.tuples(st.integers(0, KEYS - 1), st.integers(1, 12)).map(
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


def plain(value: Any) -> Any:
    """Convert a value to a form that can be compared with ``==``."""
    if isinstance(value, BindOne):
        value = value.whole()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [plain(item) for item in vars(value).values()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Pair:
    """Two cores, of which ``long`` has no fast paths.

    A step is a tuple: the name of a method, and its arguments after the core.
    """

    def __init__(self, patch: pytest.MonkeyPatch, **limits: Any) -> None:
        # Slabs have fewer slots than most runs have keys, so that runs cross slabs.
        self.short, self.long = (Rig(8, slab_bytes=8 * 4096, **limits) for _ in range(2))
        self.session, _ = (each.attach(GROUPS) for each in (self.short, self.long))
        patch.setattr(self.long.core.writing._few, "commit", lambda *args: None)
        patch.setattr(self.long.core.reading._prefix_path, "lookup", lambda *args, **_: None)
        unhold = holding._unhold_plain

        def either(state: CoreState, segment: int, slots: Pick) -> bool:
            return state is self.short.state and unhold(state, segment, slots)

        patch.setattr(holding, "_unhold_plain", either)

    def do(self, step: tuple[Any, ...]) -> None:
        """Run a step on both cores, and compare answers and resulting states."""
        answers = []
        for rig in (self.short, self.long):
            try:
                answers.append(plain(getattr(self, step[0])(rig, *step[1:])))
            except KVHearthError as error:
                answers.append((error.reason, error.message))
        assert answers[0] == answers[1]
        assert self.picture(self.short) == self.picture(self.long)

    def put(self, rig: Rig, numbers: list[int], kv_group: int, summed: bool, parent: int) -> Any:
        reserved = rig.reserve(self.session, len(numbers), kv_group)
        if reserved.short is not None:
            for part in reserved.handed:
                rig.abort(self.session, part.slots, part.generations)
            return reserved.short
        (part,) = reserved.handed
        before = key(parent) if 0 <= parent < KEYS else b"x" * (parent >= 0)
        item = rig.item(
            keys(*numbers),
            part.slots,
            part.generations,
            kv_group=kv_group,
            parent=before,
            summed=summed,
        )
        try:
            return rig.commit(self.session, item)
        except KVHearthError:
            rig.abort(self.session, part.slots, part.generations)
            raise

    def lookup(self, rig: Rig, numbers: list[int], kv_group: int, lease_id: int) -> Any:
        return rig.lookup(self.session, keys(*numbers), kv_group=kv_group, lease_id=lease_id)

    def release(self, rig: Rig, lease_id: int) -> None:
        rig.release(self.session, lease_id)

    def pin(self, rig: Rig, number: int, kv_group: int, pin_id: int) -> Any:
        return rig.pin(self.session, pin_id, keys(number), kv_group=kv_group)

    def sum(self, rig: Rig, number: int, kv_group: int) -> Any:
        head = rig.head(self.session, key(number), kv_group)
        if head < 0 or rig.state.table.state[head] != State.COMMITTED:
            return None
        slots, sums = np.array([[head]], np.int64), np.zeros((1, 1, 16), np.uint8)
        return rig.core.writing.summed(slots, rig.state.table.generation[slots], sums)

    def bump(self, rig: Rig) -> Any:
        return rig.core.bump_epoch(self.session, rig.epoch(self.session), only_alone=False)

    def picture(self, rig: Rig) -> Any:
        """Return the whole state of a core; a ring may have its members at other positions."""
        state, group = rig.state, rig.group(self.session)
        counts = {name: count for name, count in state.counts.items() if count}
        return (
            {name: what for name, what in snapshot(rig.core).items() if name != "position"},
            (counts, plain(state.actions), state.clock, state.release_epoch),
            (group.leased_at, list(group.released_early)),
        )


@pytest.mark.parametrize("held", [0.3, 1.0])
@settings(deadline=None, max_examples=15)
@given(steps=st.lists(op, max_size=40))
def test_both_ways_are_one(steps: list[tuple[Any, ...]], held: float) -> None:
    bounds: dict[str, Any] = {"leases_max": 6, "leased_slots_max": 40, "held_fraction_max": held}
    first = [("put", list(range(at, at + BLOCKS)), 0, True, at - 1) for at in (0, 8, 16)]
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(patch, **bounds)
        for step in [*first, *steps, *(("release", number) for number in range(1, 10))]:
            pair.do(step)


def test_it_is_taken_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Found | None] = []
    lookup = PrefixFastPath.lookup

    def note(self: PrefixFastPath, *args: Any, **named: Any) -> Found | None:
        answers.append(lookup(self, *args, **named))
        return answers[-1]

    monkeypatch.setattr(PrefixFastPath, "lookup", note)
    rig = Rig(1)
    session = rig.attach(contract(full(), mamba()))
    rig.put(session, keys(1, 2, 3, 4))
    rig.put(session, keys(1, 2), kv_group=1)
    for asked, kv_group, whole in (
        ((1, 2, 3, 4), 0, True),
        ((2, 3, 1), 0, True),
        ((1, 2, 9), 0, False),  # one is missing
        ((1, 2, 1), 0, False),  # one is asked for twice
        ((1, 2), 1, False),  # another kind of group
    ):
        found = rig.lookup(session, keys(*asked), kv_group=kv_group, lease_id=5)
        assert (answers.pop() is not None) == whole, asked
        heads = [rig.head(session, key(number)) for number in asked if number < 9]
        if not kv_group:  # the extents follow the keys
            assert found.groups[0].extents["slot"].tolist() == heads
        rig.release(session, 5)


@pytest.mark.parametrize("kv_group", [0, 1])
def test_a_slot_that_another_block_took_is_not_served(kv_group: int) -> None:
    """The old key still stands there; a block of another group or engine may even have the same
    key.
    """
    rig = Rig(1)
    mine = rig.attach(contract(full(), full()))
    other = mine
    if kv_group == 0:
        other = rig.attach(contract(full(), revision="other"), engine_id="o")
    rig.put(mine, keys(1, 2, 3))
    heads = [rig.head(mine, key(number)) for number in (1, 2, 3)]
    assert ascending(np.array(heads)) == slice(heads[0], heads[0] + 3)
    assert rig.remove_bad(heads[1])
    assert rig.lookup(mine, keys(1, 2, 3), lease_id=5).hit_tokens == 16
    rig.put(other, keys(2), kv_group=kv_group)
    assert rig.head(other, key(2), kv_group) == heads[1]
    found = rig.lookup(mine, keys(1, 2, 3), lease_id=6)
    assert found.groups[0].present.tolist() == [True, False, True]
    assert (found.hit_tokens, found.groups[0].extents["slot"].tolist()) == (16, heads[:1])
    rig.release(mine, 5, 6)


@no_deadline
@given(st.integers(0, 30), st.integers(1, 34), st.booleans(), st.randoms())
def test_extents_side_by_side_are_as_any(
    first: int, count: int, flagged: bool, chance: Any
) -> None:
    rig = Rig(8, slab_bytes=8 * 4096)
    session = rig.attach()
    rig.put(session, [key(number) for number in range(64)])
    table = rig.state.table
    table.generation[:] = [chance.randrange(1 << 32) for _ in range(len(table.generation))]
    if flagged:
        table.flags[chance.randrange(64)] = FLAG_VERIFY
    rows = slice(first, first + count)
    expected = table.extents(numbers(rows), 4096, summed=True)
    assert table.extents_beside(rows, 4096).tobytes() == expected.tobytes()


def test_a_slice_is_touched_as_its_slots_are() -> None:
    arrays = [PolicyArrays(16) for _ in range(2)]
    for each in arrays:
        each.freq[:8] = [0, 1, 2, 3] * 2
    for rows in (slice(1, 7), slice(2, 3), slice(0, 16)):
        arrays[0].touch(rows)
        arrays[1].touch(numbers(rows))
        assert arrays[0].freq.tolist() == arrays[1].freq.tolist()
    assert arrays[0].freq.max() == FREQ_MAX


@pytest.mark.parametrize("count", [1, 7, 8, 9, 128, 2000])
def test_the_answer_where_all_is_there_is_as_any(count: int) -> None:
    whole = Presence.of_whole(3, count, np.zeros(count, EXTENT_DTYPE))
    other = whole._replace(present=whole.present.copy(), ready=whole.ready.copy())
    replies = [cache_pb2.LookupResponse() for _ in range(2)]
    for reply, one in zip(replies, (whole, other), strict=True):
        add_presence(reply.groups, one)
    assert replies[0] == replies[1]
    (one,) = replies[0].groups
    assert (one.group, one.tiers, len(one.extents)) == (3, b"\1" * count, 40 * count)
    assert unpack_bits(one.ready, count).all()
    assert not whole.tiers.flags.writeable or count > 1024


def test_rows_that_lie_side_by_side_are_a_slice() -> None:
    for slots, wanted in (
        ([5], slice(5, 6)),
        ([5, 6, 7], slice(5, 8)),
        ([5, 7], None),
        ([], None),
    ):
        array = np.array(slots, np.int64)
        rows = ascending(array)
        assert rows == wanted if wanted is not None else rows is array
        assert numbers(rows).tolist() == slots
