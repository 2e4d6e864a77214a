"""Commits of several chains: each block follows its own predecessor, in every path and portion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.core_kit import Rig, contract, full, key, keys, singles

from kvhearth.errors import KVHearthError
from kvhearth.model import Bools
from kvhearth.proto.v1 import cache_pb2
from kvhearth_server.core.commit import Chains, CommitItem
from kvhearth_server.core.few_commits import SingleCommit
from kvhearth_server.core.slot_table import State
from kvhearth_server.transport.messages import commit_items, few_commits

CONTRACT = contract(full())


def started() -> tuple[Rig, int]:
    """A core with an engine that has stored two chains: 1, 2 and 11, 12."""
    rig = Rig()
    session = rig.attach(CONTRACT)
    rig.put(session, keys(1, 2))
    rig.put(session, keys(11, 12))
    return rig, session


def item_of(rig: Rig, session: int, named: list[bytes], chains: Chains) -> CommitItem:
    """Return a commit of keys in slots that are reserved for it."""
    slots, generations = rig.take(session, len(named))
    return replace(rig.item(named, slots, generations), chains=chains)


def general(rig: Rig, session: int, item: CommitItem) -> Bools:
    """Commit on the general path."""
    (stored,) = rig.commit(session, item)
    return stored


def few(rig: Rig, session: int, item: CommitItem) -> Bools:
    """Commit on the path of a few single blocks."""
    group, space, epoch = rig.group(session), rig.space(session), rig.epoch(session)
    stored = rig.checked(rig.core.writing.commit_few, group, space, epoch, singles(item))
    assert stored is not None, "the general path was asked for"
    return np.array(stored)


PATHS = pytest.mark.parametrize("commit", [general, few])
Commit = Callable[[Rig, int, CommitItem], Bools]


def parents_of(rig: Rig, session: int, *numbers: int) -> list[bytes | None]:
    """Return the keys before these keys in their chains."""
    index = rig.state.index
    heads = index.find(rig.space(session).number, 0, keys(*numbers))
    assert (heads >= 0).all()
    before = [rig.state.chains.parent_of(head) for head in heads.tolist()]
    return [None if head < 0 else index.key(head) for head in before]


@PATHS
def test_each_block_follows_its_own_predecessor(commit: Commit) -> None:
    rig, session = started()
    chains = Chains(np.arange(4), [key(2), key(12), b"", key(99)])
    item = item_of(rig, session, keys(3, 13, 21, 31), chains)
    assert commit(rig, session, item).all()
    assert parents_of(rig, session, 3, 13, 21, 31) == [key(2), key(12), None, None]


@PATHS
def test_a_predecessor_may_come_in_the_same_commit_but_only_before(commit: Commit) -> None:
    rig, session = started()
    chains = Chains(np.arange(4), [key(2), key(3), key(6), key(5)])
    assert commit(rig, session, item_of(rig, session, keys(3, 4, 5, 6), chains)).all()
    assert parents_of(rig, session, 3, 4, 5, 6) == [key(2), key(3), None, key(5)]


@PATHS
def test_a_known_key_gives_its_slot_back(commit: Commit) -> None:
    rig, session = started()
    chains = Chains(np.arange(3), [key(2), key(1), key(3)])
    item = item_of(rig, session, keys(3, 2, 3), chains)
    assert commit(rig, session, item).tolist() == [True, False, False]
    states = rig.state.table.state[item.slots[:, 0]].tolist()
    assert states == [State.SUMMED, State.FREE, State.FREE]


def test_nothing_changes_where_one_slot_is_not_held() -> None:
    rig, session = started()
    item = item_of(rig, session, keys(3, 13), Chains(np.arange(2), [key(2), key(12)]))
    group, namespace, epoch = rig.group(session), rig.space(session), rig.epoch(session)
    good, bad = singles(item)
    slots, generations = rig.take(rig.attach(engine_id="other"), 1)
    commit_few = rig.core.writing.commit_few
    for broken in (
        bad._replace(slot=slots.item(), generation=generations.item()),
        bad._replace(generation=bad.generation + 1),
        bad._replace(slot=good.slot, generation=good.generation),
        bad._replace(parent=b"short"),
    ):
        assert commit_few(group, namespace, epoch, [good, broken]) is None
        assert rig.state.table.state[item.slots].tolist() == [[State.RESERVED]] * 2
    assert commit_few(group, namespace, epoch, [good._replace(kv_group=7)]) is None
    assert commit_few(group, namespace, epoch + 1, [good, bad]) is None
    rig.check()


def test_portions_link_like_the_whole() -> None:
    for portion in (1, 2, 3, 5, 64):
        rig, session = started()
        chains = Chains(np.array([0, 3, 4]), [key(2), key(12), b""])
        item = item_of(rig, session, keys(3, 4, 5, 13, 21, 22), chains)
        commit = rig.core.writing.begin_commit(session, rig.epoch(session), [item])
        while commit.unfinished:
            commit.bind_some(portion)
        rig.check()
        wanted = [key(2), key(3), key(4), key(12), None, key(21)]
        assert parents_of(rig, session, 3, 4, 5, 13, 21, 22) == wanted, portion


def message(**change: object) -> list[cache_pb2.GroupCommit]:
    """Return a commit of two keys of two chains."""
    numbers = np.arange(2, dtype="<u4").tobytes()
    fields: dict[str, object] = {
        "keys": key(3) + key(13),
        "slots": numbers,
        "generations": numbers,
        "chains": numbers,
        "parents": key(2) + bytes(32),
    }
    return [cache_pb2.GroupCommit(**{**fields, **change})]


def test_a_message_of_several_chains_is_read() -> None:
    ones = few_commits(CONTRACT, message(checksums=bytes(32)))
    assert ones == [
        SingleCommit(0, key(3), 0, 0, bytes(16), key(2)),
        SingleCommit(0, key(13), 1, 1, bytes(16), b""),
    ]
    (item,) = commit_items(CONTRACT, message(), 8)
    assert item.chains is not None
    assert (item.chains.starts.tolist(), item.chains.parents) == ([0, 1], [key(2), b""])


def test_chains_that_do_not_fit_are_refused() -> None:
    for change in (
        {"chains": b""},
        {"parents": key(2)},
        {"chains": np.array([1, 0], "<u4").tobytes()},
        {"chains": np.array([0, 0], "<u4").tobytes()},
        {"chains": np.array([0, 2], "<u4").tobytes()},
        {"chains": np.array([1], "<u4").tobytes(), "parents": key(2)},
        {"chains": b"\0\0\0"},
        {"parents": b"\0"},
    ):
        assert few_commits(CONTRACT, message(**change)) is None, change
        with pytest.raises(KVHearthError, match=r"^bad_(keys|extents): "):
            commit_items(CONTRACT, message(**change), 8)
