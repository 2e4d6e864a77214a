"""Chains: a forest of links between heads, compared with dicts of parents and children."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import Rig, contract, full, key, keys, no_deadline

from kvhearth.model import I64
from kvhearth_server.core.index import Chains
from kvhearth_server.core.slot_table import Geometry, SlotTable

SLOTS = 32


def forest() -> tuple[SlotTable, Chains]:
    """An empty forest over a small table."""
    geometry = Geometry.of([("t", 4096 * SLOTS)], 4096 * SLOTS, 4096)
    table = SlotTable(geometry, np.zeros(SLOTS, np.uint32))
    return table, Chains(table)


def heads(*numbers: int) -> I64:
    """Heads as an array."""
    return np.array(numbers, np.int64)


@no_deadline
@given(st.data())
def test_many_are_taken_out_as_one_by_one(data: st.DataObject) -> None:
    """Removes any heads of any forest: parents with their children, neighbours, whole families."""
    (table, chains), (other_table, others) = forest(), forest()
    for head in range(1, SLOTS):
        parent = data.draw(st.integers(-1, head - 1))
        for each in (chains, others) if parent >= 0 else ():
            each.link(parent, head)
    gone = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
    chains.unlink_many(heads(*gone))
    for head in gone:
        others.unlink(head)
    assert chains.cuts == others.cuts
    for name in ("parent", "child", "older", "younger"):
        assert getattr(table, name).tolist() == getattr(other_table, name).tolist(), name
    chains.check(heads(*(set(range(SLOTS)) - set(gone))))


def test_the_check_finds_links_that_disagree() -> None:
    table, chains = forest()
    chains.link_run(heads(0, 1, 2))
    with pytest.raises(ValueError, match="bound to no key"):
        chains.check(heads(1, 2))
    table.younger[2] = 9
    with pytest.raises(ValueError, match="names a youngest child that says otherwise"):
        chains.check(heads(0, 1, 2))
    table.younger[2] = 0
    table.child[0] = 0
    with pytest.raises(ValueError, match="its parent does not name"):
        chains.check(heads(0, 1, 2))


class Plain:
    """The same in dicts: the parent of each head, and its children, oldest first."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}

    def add(self, head: int, parent: int) -> None:
        self.parents[head] = parent
        self.children[head] = []
        if parent >= 0:
            self.children[parent].append(head)

    def remove(self, head: int) -> None:
        for child in self.children.pop(head):
            self.parents[child] = -1
        parent = self.parents.pop(head)
        if parent >= 0:
            self.children[parent].remove(head)

    def leaf(self, head: int) -> int:
        while self.children[head]:
            head = self.children[head][-1]
        return head


@no_deadline
@given(data=st.data())
def test_against_dicts(data: st.DataObject) -> None:
    _, chains = forest()
    plain, free = Plain(), list(range(SLOTS))
    for _ in range(data.draw(st.integers(1, 40))):
        present = sorted(plain.parents)
        if present and data.draw(st.booleans()) and (len(present) > 20 or data.draw(st.booleans())):
            head, before = data.draw(st.sampled_from(present)), chains.cuts
            chains.unlink(head)
            plain.remove(head)
            assert chains.cuts == before + 1
            free.append(head)
        elif free:
            parent = data.draw(st.sampled_from([-1, *present]))
            run = [free.pop(0) for _ in range(data.draw(st.integers(1, min(4, len(free)))))]
            if parent >= 0:
                chains.link(parent, run[0])
            chains.link_run(heads(*run))
            for head, before in zip(run, [parent, *run], strict=False):
                plain.add(head, before)
        chains.check(heads(*plain.parents))
        for head, parent in plain.parents.items():
            assert chains.parent_of(head) == parent
            assert chains.leaf(head) == plain.leaf(head)
            assert chains.is_leaf(head) == (not plain.children[head])


# -- through commits -------------------------------------------------------------------------------


def line(rig: Rig, session: int, number: int) -> list[int]:
    """Keys from one block up to the root of its chain."""
    chains, found = rig.state.chains, [number]
    number_of = {rig.head(session, key(i)): i for i in range(100)}
    while (head := chains.parent_of(rig.head(session, key(found[-1])))) >= 0:
        found.append(number_of[head])
    return found


def test_commits_are_linked_to_the_blocks_before_them() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1))
    rig.put(session, keys(2), parent=key(1))
    rig.put(session, keys(3, 4), parent=key(2))
    assert line(rig, session, 4) == [4, 3, 2, 1, 0]
    # Blocks that are there are followed, too.
    rig.put(session, keys(0, 1, 7))
    assert line(rig, session, 7) == [7, 1, 0]
    assert line(rig, session, 4) == [4, 3, 2, 1, 0]
    # An unknown parent starts a chain.
    rig.put(session, keys(9, 10), parent=key(8))
    assert line(rig, session, 10) == [10, 9]


def test_chains_of_two_groups_do_not_meet() -> None:
    rig = Rig()
    session = rig.attach(contract(full(), full()))
    rig.put(session, keys(0, 1), kv_group=0)
    rig.put(session, keys(2), kv_group=1, parent=key(1))
    head = rig.head(session, key(2), kv_group=1)
    assert rig.state.chains.parent_of(head) == -1
