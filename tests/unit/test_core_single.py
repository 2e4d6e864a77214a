"""One key at a time: the short way leaves the same state as the general one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import KEY_BYTES, Rig, contract, full, key, mamba, no_deadline, window

from kvhearth.errors import KVHearthError
from kvhearth.model import EXTENT_DTYPE, FLAG_VERIFY
from kvhearth_server.core.binding import CommitItem
from kvhearth_server.core.single import Singles
from kvhearth_server.core.table import State

KEYS = 12
PAIR = contract(full(), window(64), full(page_bytes=8192))

op = st.one_of(
    st.tuples(
        st.just("put"),
        st.integers(0, KEYS - 1),
        st.integers(0, 2),
        st.booleans(),
        st.integers(-1, KEYS),
    ),
    st.tuples(st.just("lookup"), st.integers(0, KEYS - 1), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(1, 9)),
    st.tuples(st.just("pin"), st.integers(0, KEYS - 1), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("sum"), st.integers(0, KEYS - 1), st.integers(0, 2)),
    st.just(("bump",)),
)


def plain(value: Any) -> Any:
    """What can be compared with ``==``."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [plain(item) for item in vars(value).values()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Pair:
    """The same core twice, one of them without the short way."""

    def __init__(self) -> None:
        self.short, self.long = (
            Rig(3, slab_bytes=16 * 4096, leases_max=6, leased_slots_max=7) for _ in range(2)
        )
        self.session, _ = (rig.attach(PAIR) for rig in (self.short, self.long))
        for half in (self.long.core.writing, self.long.core.reading):
            single = half._singles
            single.commit = lambda *args: False  # type: ignore[method-assign]
            single.lookup = lambda *args: -1  # type: ignore[method-assign]

    def do(self, step: tuple[Any, ...]) -> None:
        """Both do it, and answer and end up the same."""
        answers = []
        for rig in (self.short, self.long):
            try:
                answers.append(plain(getattr(self, step[0])(rig, *step[1:])))
            except KVHearthError as error:
                answers.append((error.reason, error.message))
        assert answers[0] == answers[1]
        assert self.picture(self.short) == self.picture(self.long)

    def put(self, rig: Rig, number: int, kv_group: int, summed: bool, parent: int) -> Any:
        slots, generations = rig.take(self.session, 1, kv_group)
        before = key(parent) if 0 <= parent < KEYS else b"x" * (parent == KEYS)
        item = rig.item(
            [key(number)], slots, generations, kv_group=kv_group, parent=before, summed=summed
        )
        try:
            return rig.commit(self.session, item)
        except KVHearthError:
            rig.abort(self.session, slots, generations)
            raise

    def lookup(self, rig: Rig, number: int, kv_group: int, lease_id: int) -> Any:
        return rig.lookup(self.session, [key(number)], kv_group=kv_group, lease_id=lease_id)

    def release(self, rig: Rig, lease_id: int) -> None:
        rig.core.reading.release(self.session, [lease_id])

    def pin(self, rig: Rig, number: int, kv_group: int, pin_id: int) -> Any:
        return rig.pin(self.session, pin_id, [key(number)], kv_group=kv_group)

    def sum(self, rig: Rig, number: int, kv_group: int) -> Any:
        head = rig.head(self.session, key(number), kv_group)
        if head < 0 or rig.state.table.state[head] != State.COMMITTED:
            return None
        slots = np.array([[head]], np.int64)
        sums = np.zeros((1, 1, 16), np.uint8)
        return rig.core.writing.summed(slots, rig.state.table.generation[slots], sums)

    def bump(self, rig: Rig) -> Any:
        return rig.core.bump_epoch(self.session, rig.epoch(self.session), only_alone=False)

    def picture(self, rig: Rig) -> Any:
        """All that either of them knows."""
        state, group = rig.state, rig.group(self.session)
        arrays = {
            name: array.tobytes()
            for owner in (state.table, state.policies._arrays)
            for name, array in vars(owner).items()
            if isinstance(array, np.ndarray) and name != "position"
        }
        namespace = state.namespaces.get(group.namespace)
        return (
            arrays,
            [vars(books) for books in state.ledger.segments],
            state.counts,
            plain(state.actions),
            (state.clock, state.sequence, state.loosened, state.events.next_sequence),
            {number: slots.tolist() for number, slots in group.leases.items()},
            (group.leased_at, list(group.released_early), group.stock_bytes),
            (namespace.blocks, namespace.used_bytes),
            {place: state.policies.members(*place).tolist() for place in state.policies.places()},
            list(state.index.items()),
        )


@no_deadline
@given(st.lists(op, max_size=40))
def test_both_ways_are_one(steps: list[tuple[Any, ...]]) -> None:
    pair = Pair()
    for step in steps:
        pair.do(step)


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noted(name: str) -> None:
        whole = getattr(Singles, name)

        def note(self: Singles, *args: Any) -> Any:
            answer = whole(self, *args)
            taken.append(f"{name} {answer}")
            return answer

        monkeypatch.setattr(Singles, name, note)

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


def test_what_is_not_plain_goes_the_general_way() -> None:
    rig = Rig(2)
    session = rig.attach(contract(full(), mamba()))
    slots, generations = rig.take(session, 1)
    good = rig.item([key(1)], slots, generations)
    single = rig.core.writing._singles
    group = rig.group(session)
    namespace = rig.state.namespaces.get(group.namespace)
    for change in (
        {"kv_group": 2},
        {"kv_group": -1},
        {"keys": [key(1), key(2)]},
        {"keys": []},
        {"slots": slots[0]},
        {"slots": slots + (1 << 40)},
        {"slots": slots - (1 << 40)},
        {"slots": slots + 1},
        {"generations": generations[0]},
        {"generations": generations + np.uint32(1)},
        {"checksums": np.zeros((1, 16), np.uint8)},
        {"parent": b"short"},
    ):
        before = rig.state.table.state.tobytes()
        item: CommitItem = dataclasses.replace(good, **change)
        assert not single.commit(group, namespace, item), change
        assert rig.state.table.state.tobytes() == before
        rig.check()
    assert single.commit(group, namespace, good)
    rig.state.take_actions()
    rig.check()
    assert single.lookup(group, namespace, 0, key(2), 1) == -1
    assert single.lookup(group, namespace, 0, key(1)[: KEY_BYTES - 1], 1) == -1
    assert single.lookup(group, namespace, 7, key(1), 1) == -1
    rig.check()
