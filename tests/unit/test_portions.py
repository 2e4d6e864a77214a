"""Calls of more blocks than the daemon takes at once answer like one call would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from support.core_kit import contract, full, key, keys, mamba, no_deadline, window
from support.core_shell import Desk

from kvhearth import portions
from kvhearth.model import EXTENT_BYTES, EXTENT_DTYPE
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import CommitGroup, LookupResult
from kvhearth.wire.messages import pack_query, parse_lookup

CONTRACT = contract(full(shards=2), window(40), mamba(block_tokens=32))
COUNTS = {0: 24, 1: 24, 2: 12}


class Served:
    """A daemon's core behind its dispatcher, in which some of all blocks are stored."""

    def __init__(self, stored: dict[int, set[int]]) -> None:
        self.desk = Desk(16, stock_fraction_max=0.9)
        self.session = self.desk.attach(CONTRACT)
        self.welcome = self.desk.attached[self.session].welcome
        for group, blocks in stored.items():
            if blocks:
                self.desk.put(self.session, keys(*sorted(blocks)), kv_group=group)

    def ask(self, request: pb.LookupRequest) -> pb.LookupResponse:
        """Answer one call."""
        reply = self.desk.ask(self.session, "Lookup", request)
        assert isinstance(reply, pb.LookupResponse)
        return reply

    def release(self, lease_id: int) -> None:
        """End a lease."""
        self.desk.ask(self.session, "Release", pb.ReleaseRequest(lease_ids=[lease_id]))
        self.desk.check()


def whole(served: Served, lease_id: int) -> LookupResult:
    """Look all keys up by one call."""
    query = pack_query(CONTRACT, {group: keys(*range(n)) for group, n in COUNTS.items()})
    request = pb.LookupRequest(epoch=served.welcome.epoch, lease_id=lease_id)
    query.put_into(request.groups)
    return parse_lookup(CONTRACT, served.welcome, query, lease_id, served.ask(request))


def long(served: Served, lease_id: int, keys_max: int) -> LookupResult:
    """Look all keys up in portions."""
    query = pack_query(CONTRACT, {group: keys(*range(n)) for group, n in COUNTS.items()})
    request = pb.LookupRequest(epoch=served.welcome.epoch, lease_id=lease_id)
    welcome = replace(served.welcome, keys_max=keys_max)
    return portions.LongLookup(CONTRACT, welcome, query, request, served.ask).run()


some = st.integers(0, 24).flatmap(
    lambda run: st.sets(st.integers(0, 23), max_size=8).map(lambda more: {*range(run), *more})
)


@no_deadline
@given(some, some, some, st.integers(1, 30), st.booleans())
@example({*range(24)}, {*range(24)}, {*range(24)}, 1, True)
def test_a_lookup_in_portions_finds_and_leases_what_one_call_does(
    fulls: set[int], windows: set[int], states: set[int], keys_max: int, leases: bool
) -> None:
    served = Served({0: fulls, 1: windows, 2: {block for block in states if block < 12}})
    expected = whole(served, 1 if leases else 0)
    found = long(served, 2 if leases else 0, keys_max)
    assert found.hit_tokens == expected.hit_tokens
    assert bool(found.lease) >= bool(expected.lease)
    for group, wanted in expected.groups.items():
        mine, shards = found.groups[group], CONTRACT.groups[group].shards
        for name in ("present", "ready", "tiers"):
            assert (getattr(mine, name) == getattr(wanted, name)).all(), (group, name)
        assert (mine.leased >= wanted.leased).all()
        rows = mine.extents.reshape(-1, shards)[wanted.leased[mine.leased]]
        assert rows.tobytes() == wanted.extents.tobytes()
    if leases:
        for lease_id, one in ((1, expected), (2, found)):
            if one.lease:
                served.release(lease_id)
        assert not served.desk.state.table.refs.any()


def test_a_portion_that_comes_after_the_release_leases_nothing() -> None:
    served = Served({0: {*range(24)}})
    epoch = served.welcome.epoch

    def portion(first: int, *, joins: bool) -> pb.LookupResponse:
        request = pb.LookupRequest(epoch=epoch, lease_id=7, portion=True, joins=joins)
        request.groups.add(group=0, keys=b"".join(keys(*range(first, first + 8))))
        return served.ask(request)

    assert portion(0, joins=False).lease_id == portion(8, joins=True).lease_id == 7
    again = portion(4, joins=True)
    assert (again.lease_id, len(again.groups[0].extents)) == (7, 8 * 2 * EXTENT_BYTES)
    group = served.desk.group(served.session)
    assert (len(group.leases), len(group.leases[7])) == (1, 32)
    served.desk.check()
    served.release(7)
    assert not served.desk.state.table.refs.any()
    late = portion(16, joins=True)
    assert (late.lease_id, late.groups[0].extents) == (0, b"")
    assert served.ask(pb.LookupRequest(epoch=epoch, lease_id=8)).lease_id == 0
    served.desk.check()


def test_a_daemon_counts_the_tokens_of_a_request_in_portions_once() -> None:
    served = Served({0: {*range(20)}, 1: {*range(24)}, 2: {*range(12)}})
    assert long(served, 3, 5).hit_tokens == 20 * 16
    group = served.desk.group(served.session)
    assert (group.asked_tokens, group.hit_tokens) == (24 * 16, 20 * 16)


def test_commits_are_split_along_their_chains() -> None:
    extents = np.zeros((7, 2), EXTENT_DTYPE)
    extents["slot"] = np.arange(14).reshape(7, 2)
    sums = np.arange(7 * 2 * 16, dtype=np.uint8).reshape(7, 2, 16)
    item = CommitGroup(keys(*range(7)), extents, sums, chains=((0, b"a"), (2, b"b"), (3, b"c")))
    parts = [part[0] for part in portions.commits({0: item}, 3)]
    assert [list(part.keys) for part in parts] == [keys(0, 1, 2), keys(3, 4, 5), keys(6)]
    assert [list(part.chains) for part in parts] == [
        [(0, b"a"), (2, b"b")],
        [(0, b"c")],
        [(0, key(5))],
    ]
    assert np.concatenate([part.extents for part in parts]).tobytes() == extents.tobytes()
    assert np.concatenate([part.checksums for part in parts]).tobytes() == sums.tobytes()
    one = CommitGroup(keys(*range(4)), extents[:4], parent=b"p")
    chains = [list(part[0].chains) for part in portions.commits({0: one}, 2)]
    assert chains == [[(0, b"p")], [(0, key(1))]]
