"""Bad calls on the gRPC socket of a real daemon: a status, a reason, a count, and no harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from support.daemon import Daemon, until
from support.raw_door import (
    CALL_S,
    PAGE_BYTES,
    RawSession,
    commit_group,
    new_id,
    new_keys,
    raw_contract,
    refused,
    slots_of,
)

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.errors import Code, Reason
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.proto.v1 import cache_pb2
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire.frames import error_from_code
from kvhearth_lab.harness.engine import Engine, contract_of

KEYS_MAX = 64
LEASES_MAX = 3
PINS_MAX = 2
MESSAGE_BYTES_MAX = 64 << 10

CACHE_METHODS = list(cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods_by_name)


DAEMON = {
    "memory": "32MiB",
    "slot_bytes_min": "4KiB",
    "keys_max": KEYS_MAX,
    "leases_max": LEASES_MAX,
    "pins_max": PINS_MAX,
    "pin_ttl_max_s": 60,
    "message_bytes_max": MESSAGE_BYTES_MAX,
}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


@pytest.fixture
def session(daemon: Daemon) -> Iterator[RawSession]:
    """A scheduler whose contract has two groups: pages of 16 KiB and of 8 KiB."""
    groups = (
        GroupSpec(GroupKind.FULL, 16, PAGE_BYTES),
        GroupSpec(GroupKind.FULL, 16, PAGE_BYTES // 2),
    )
    with RawSession(daemon, contract=raw_contract(groups=groups).to_json()) as session:
        yield session


def request_of(method: str) -> Any:
    """An empty request of a method of the cache service."""
    return getattr(pb, f"{method}Request")()


# -- authentication ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CACHE_METHODS)
@pytest.mark.parametrize("token", ["", "0" * 64, "x"], ids=["missing", "unknown", "short"])
def test_no_session(daemon: Daemon, session: RawSession, method: str, token: str) -> None:
    with refused(daemon, Reason.UNKNOWN_TOKEN) as caught:
        session.call(method, request_of(method), token=token)
    assert caught.value.status.code is Code.UNAUTHENTICATED
    assert caught.value.details["boot_id"] == session.boot_id


def test_a_worker_decides_nothing(daemon: Daemon) -> None:
    group = {"engine_id": "tp2", "contract": raw_contract(tensor_parallel=2).to_json()}
    with (
        RawSession(daemon, **group),
        RawSession(daemon, **group, scheduler=False, rank=1) as worker,
    ):
        assert worker.call("Heartbeat", pb.HeartbeatRequest()).group_complete
        for method in set(CACHE_METHODS) - {"Heartbeat"}:
            with refused(daemon, Reason.NOT_SCHEDULER):
                worker.call(method, request_of(method))


def test_an_incomplete_group_reserves_nothing(daemon: Daemon) -> None:
    contract = raw_contract(tensor_parallel=2).to_json()
    with RawSession(daemon, contract=contract) as alone:
        with refused(daemon, Reason.GROUP_INCOMPLETE):
            alone.reserve(1)
        assert alone.lookup(new_keys(2)).hit_tokens == 0


def test_a_dead_group(daemon: Daemon) -> None:
    """The group ends with its scheduler: for its worker too, with everything it held."""
    group = {"engine_id": "dead", "contract": raw_contract(tensor_parallel=2).to_json()}
    scheduler = RawSession(daemon, **group)
    with RawSession(daemon, **group, scheduler=False, rank=1) as worker:
        kept, _ = scheduler.store(2)
        extents = scheduler.reserve(2)
        assert scheduler.lookup(kept, lease_id=new_id()).lease_id
        ended = daemon.counters()["groups_ended"]
        scheduler.line.close()
        until(lambda: daemon.counters()["groups_ended"] > ended, "the group has ended")
        with refused(daemon, Reason.UNKNOWN_TOKEN):
            scheduler.commit(new_keys(2), extents)
        with refused(daemon, Reason.GROUP_GONE):
            worker.call("Heartbeat", pb.HeartbeatRequest())
        with refused(daemon, Reason.GROUP_GONE):
            worker.commit(new_keys(2), extents)
    scheduler.close(bye=False)
    with RawSession(daemon, **group) as again:
        assert again.welcome["incarnation"] == scheduler.welcome["incarnation"] + 1
        assert again.lookup(kept).groups[0].present == b"\x03"
        with refused(daemon, Reason.NOT_RESERVED):
            again.commit(new_keys(2), extents)


# -- lengths and counts --------------------------------------------------------------------------

WITH_KEYS = ["Lookup", "Prefetch", "Pin", "Touch", "Commit"]


def keys_request(method: str, epoch: int, groups: list[dict[str, Any]]) -> Any:
    request = request_of(method)
    request.epoch = epoch
    if method == "Pin":
        request.pin_id, request.ttl_ms = new_id(), 1000
    for group in groups:
        request.groups.add(**group)
    return request


BAD_KEYS: dict[str, tuple[list[dict[str, Any]], Reason]] = {
    "a torn key": ([{"keys": bytes(33)}], Reason.BAD_KEYS),
    "one byte": ([{"keys": b"k"}], Reason.BAD_KEYS),
    "too many keys": ([{"keys": bytes(32 * (KEYS_MAX + 1))}], Reason.TOO_MANY_KEYS),
    "too many keys together": (
        [{"group": 0, "keys": bytes(32 * KEYS_MAX)}, {"group": 1, "keys": bytes(32)}],
        Reason.TOO_MANY_KEYS,
    ),
    "65 groups": ([{}] * 65, Reason.BAD_GROUP),
    "thousands of groups": ([{}] * 20_000, Reason.BAD_GROUP),
    "a group that is not there": ([{"group": 2}], Reason.BAD_GROUP),
    "a group of 32 bits": ([{"group": 0xFFFFFFFF}], Reason.BAD_GROUP),
}


@pytest.mark.parametrize("method", WITH_KEYS)
@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_keys(daemon: Daemon, session: RawSession, method: str, name: str) -> None:
    groups, reason = BAD_KEYS[name]
    with refused(daemon, reason):
        session.call(method, keys_request(method, session.epoch, groups))


def test_a_group_asked_for_twice(daemon: Daemon, session: RawSession) -> None:
    twice = [{"group": 1, "keys": bytes(32)}] * 2
    for method in ("Lookup", "Prefetch", "Touch"):
        with refused(daemon, Reason.BAD_GROUP):
            session.call(method, keys_request(method, session.epoch, twice))


def test_no_keys_are_no_mistake(session: RawSession) -> None:
    for groups in ([], [{"group": 0}], [{"group": 1}, {"group": 0}]):
        for method in WITH_KEYS:
            request = keys_request(method, session.epoch, groups)
            session.call(method, request)
            if method == "Pin":
                session.call("Unpin", pb.UnpinRequest(pin_ids=[request.pin_id]))


BAD_RESERVES: dict[str, tuple[dict[str, Any], Reason]] = {
    "no id": ({"reservation_id": 0}, Reason.BAD_MESSAGE),
    "an id of 64 bits": ({"reservation_id": (1 << 64) - 1}, Reason.BAD_MESSAGE),
    "too many": ({"groups": [{"count": KEYS_MAX + 1}]}, Reason.TOO_MANY_KEYS),
    "a count of 32 bits": ({"groups": [{"count": 0xFFFFFFFF}]}, Reason.TOO_MANY_KEYS),
    "too many together": ({"groups": [{"count": 40}] * 2}, Reason.TOO_MANY_KEYS),
    "65 groups": ({"groups": [{}] * 65}, Reason.BAD_GROUP),
    "thousands of groups": ({"groups": [{}] * 20_000}, Reason.BAD_GROUP),
    "a group that is not there": ({"groups": [{"group": 2, "count": 1}]}, Reason.BAD_GROUP),
    "a stale epoch": ({"epoch": 0}, Reason.STALE_EPOCH),
    "an epoch to come": ({"epoch": (1 << 64) - 1}, Reason.STALE_EPOCH),
}


@pytest.mark.parametrize("name", BAD_RESERVES)
def test_bad_reserve(daemon: Daemon, session: RawSession, name: str) -> None:
    changes, reason = BAD_RESERVES[name]
    good = {"reservation_id": new_id(), "epoch": session.epoch, "groups": [{"count": 1}]}
    with refused(daemon, reason):
        session.call("Reserve", pb.ReserveRequest(**{**good, **changes}))
    assert sum(part.reserved_bytes for part in daemon.stats().segments) == 0


def test_a_reservation_twice_is_the_same(session: RawSession) -> None:
    request = pb.ReserveRequest(reservation_id=new_id(), epoch=session.epoch, groups=[{"count": 3}])
    first, second = session.call("Reserve", request), session.call("Reserve", request)
    assert first.groups == second.groups
    freed = session.call("Abort", pb.AbortRequest(reservation_ids=[request.reservation_id]))
    assert (freed.freed_slots, freed.quarantined_slots) == (3, 0)


def test_too_many_counters(daemon: Daemon, session: RawSession) -> None:
    with refused(daemon, Reason.BAD_MESSAGE):
        session.call("Heartbeat", pb.HeartbeatRequest(counters={f"c{i}": i for i in range(65)}))


def test_too_long_a_message(daemon: Daemon, session: RawSession) -> None:
    """gRPC itself rejects it; the client distinguishes it from overload by the error's text."""
    request = pb.HeartbeatRequest(counters={"x" * MESSAGE_BYTES_MAX: 1})
    call = session.channel.unary_unary("/kvhearth.proto.v1.CacheService/Heartbeat")
    with pytest.raises(grpc.RpcError) as caught:
        call(request.SerializeToString(), timeout=CALL_S, metadata=session.metadata)
    code = caught.value.code().value[0]
    assert code == Code.RESOURCE_EXHAUSTED
    text = caught.value.details() or ""
    assert error_from_code(code, text).reason is Reason.BAD_MESSAGE
    assert error_from_code(code, "").reason is Reason.DAEMON_AWAY
    session.call("Heartbeat", pb.HeartbeatRequest())


def test_no_answer_is_longer_than_a_message(daemon: Daemon) -> None:
    """Many shards make long answers, so a call takes fewer blocks; the welcome says how many."""
    ranks = 64
    group = GroupSpec(GroupKind.FULL, 16, 4096, shards=ranks)
    contract = raw_contract(groups=(group,), tensor_parallel=ranks).to_json()
    who = {"engine_id": "wide", "contract": contract}
    with contextlib.ExitStack() as members:
        scheduler = members.enter_context(RawSession(daemon, **who))
        for rank in range(1, ranks):
            members.enter_context(RawSession(daemon, **who, scheduler=False, rank=rank))
        most = scheduler.welcome["keys_max"]
        assert 1 < most < KEYS_MAX
        keys, extents = new_keys(most), scheduler.reserve(most)
        assert len(extents) == most * ranks
        scheduler.commit(keys, extents)
        assert scheduler.lookup(keys, lease_id=new_id()).hit_tokens == 16 * most
        with refused(daemon, Reason.TOO_MANY_KEYS):
            scheduler.reserve(most + 1)
        with refused(daemon, Reason.TOO_MANY_KEYS):
            scheduler.lookup([*keys, *new_keys(1)])


# -- commits -------------------------------------------------------------------------------------


def with_(extents: Records, **columns: Any) -> Records:
    """Returns the extents with other values in their first row."""
    copy = extents.copy()
    for name, value in columns.items():
        copy[name][0] = value
    return copy


BAD_COMMITS: dict[str, tuple[Callable[[Records], dict[str, Any]], Reason]] = {
    "torn slots": (lambda e: {"slots": e["slot"].tobytes()[:-1]}, Reason.BAD_EXTENTS),
    "a slot too few": (lambda e: {"slots": e["slot"][1:].tobytes()}, Reason.BAD_EXTENTS),
    "no slots": (lambda e: {"slots": b""}, Reason.BAD_EXTENTS),
    "a slot too many": (lambda e: {"slots": e["slot"].tobytes() + bytes(4)}, Reason.BAD_EXTENTS),
    "torn generations": (lambda e: {"generations": bytes(7)}, Reason.BAD_EXTENTS),
    "no generations": (lambda e: {"generations": b""}, Reason.BAD_EXTENTS),
    "torn checksums": (lambda e: {"checksums": bytes(31)}, Reason.BAD_CHECKSUMS),
    "a checksum too few": (lambda e: {"checksums": bytes(16)}, Reason.BAD_CHECKSUMS),
    "a checksum too many": (lambda e: {"checksums": bytes(48)}, Reason.BAD_CHECKSUMS),
    "a short parent": (lambda e: {"parent": bytes(31)}, Reason.BAD_KEYS),
    "a long parent": (lambda e: {"parent": bytes(64)}, Reason.BAD_KEYS),
    "a key too few": (lambda e: {"keys": bytes(32)}, Reason.BAD_EXTENTS),
    "a key too many": (lambda e: {"keys": bytes(96)}, Reason.BAD_EXTENTS),
    "a slot outside": (
        lambda e: {"slots": with_(e, slot=0xFFFFFFFF)["slot"].tobytes()},
        Reason.BAD_EXTENTS,
    ),
    "a slot of another size": (lambda e: {"group": 1}, Reason.BAD_EXTENTS),
    "a slot twice": (
        lambda e: {"slots": with_(e, slot=e["slot"][1])["slot"].tobytes()},
        Reason.BAD_EXTENTS,
    ),
    "a slot that nobody reserved": (
        lambda e: {"slots": with_(e, slot=e["slot"].max() + 1)["slot"].tobytes()},
        Reason.NOT_RESERVED,
    ),
    "a stale generation": (
        lambda e: {"generations": (e["generation"] - np.uint32(1)).tobytes()},
        Reason.STALE_EXTENT,
    ),
}


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_bad_commit(daemon: Daemon, session: RawSession, name: str) -> None:
    """A rejected commit binds nothing, and its reserved slots stay usable."""
    change, reason = BAD_COMMITS[name]
    keys, extents = new_keys(2), session.reserve(2)
    with refused(daemon, reason):
        session.commit(keys, extents, **change(extents))
    assert session.lookup(keys).groups[0].present == b"\0"
    assert session.commit(keys, extents).stored[0].bits == b"\x03"


def test_a_bad_group_spoils_the_whole_commit(daemon: Daemon, session: RawSession) -> None:
    keys, extents = new_keys(2), session.reserve(2)
    torn = commit_group(new_keys(1), extents[:1], checksums=bytes(15))
    twice = commit_group(new_keys(1), extents[:1])
    for bad, reason in ((torn, Reason.BAD_CHECKSUMS), (twice, Reason.BAD_EXTENTS)):
        groups = [commit_group(keys, extents), bad]
        with refused(daemon, reason):
            session.call("Commit", pb.CommitRequest(epoch=session.epoch, groups=groups))
        assert session.lookup(keys).groups[0].present == b"\0"
    assert session.abort(extents).freed_slots == 2


def test_a_double_commit(daemon: Daemon, session: RawSession) -> None:
    keys, extents = session.store(2)
    for again in (keys, new_keys(2)):
        with refused(daemon, Reason.ALREADY_COMMITTED) as caught:
            session.commit(again, extents)
        assert caught.value.status.code is Code.ALREADY_EXISTS
    with refused(daemon, Reason.ALREADY_COMMITTED):
        session.abort(extents)
    assert session.lookup(keys).groups[0].present == b"\x03"


def test_the_same_keys_again_give_their_slots_back(daemon: Daemon, session: RawSession) -> None:
    keys, _ = session.store(2)
    assert session.commit(keys, session.reserve(2)).stored[0].bits == b"\0"
    both = [keys[0], keys[0]]
    assert session.commit(both, session.reserve(2)).stored[0].bits == b"\0"
    fresh = new_keys(1) * 2
    assert session.commit(fresh, session.reserve(2)).stored[0].bits == b"\x01"
    assert sum(part.reserved_bytes for part in daemon.stats().segments) == 0


def test_a_foreign_extent(daemon: Daemon, session: RawSession) -> None:
    with RawSession(daemon, contract=raw_contract().to_json()) as other:
        extents = session.reserve(2)
        for steal in (lambda: other.commit(new_keys(2), extents), lambda: other.abort(extents)):
            with refused(daemon, Reason.FOREIGN_EXTENT) as caught:
                steal()
            assert caught.value.status.code is Code.PERMISSION_DENIED
        assert session.abort(extents).freed_slots == 2
        with refused(daemon, Reason.NOT_RESERVED):
            session.abort(extents)
        with refused(daemon, Reason.NOT_RESERVED):
            session.commit(new_keys(2), extents)


def test_aborts_in_doubt(daemon: Daemon, session: RawSession) -> None:
    extents = session.reserve(2)
    groups = [slots_of(extents)]
    doubt = session.call("Abort", pb.AbortRequest(groups=groups, in_doubt=True))
    assert (doubt.freed_slots, doubt.quarantined_slots) == (0, 2)
    with refused(daemon, Reason.NOT_RESERVED):
        session.commit(new_keys(2), extents)
    twice = [slots_of(np.concatenate([extents, extents]))]
    assert session.call("Abort", pb.AbortRequest(groups=twice)).freed_slots == 2


BAD_SLOTS: dict[str, tuple[dict[str, bytes], Reason]] = {
    "torn slots": ({"slots": bytes(5), "generations": bytes(4)}, Reason.BAD_EXTENTS),
    "torn generations": ({"slots": bytes(4), "generations": bytes(5)}, Reason.BAD_EXTENTS),
    "a generation too few": ({"slots": bytes(8), "generations": bytes(4)}, Reason.BAD_EXTENTS),
    "no slots": ({"slots": b"", "generations": bytes(4)}, Reason.BAD_EXTENTS),
}


@pytest.mark.parametrize("name", BAD_SLOTS)
def test_bad_slots(daemon: Daemon, session: RawSession, name: str) -> None:
    item, reason = BAD_SLOTS[name]
    with refused(daemon, reason):
        session.call("Abort", pb.AbortRequest(groups=[item]))
    with refused(daemon, reason):
        session.call("Release", pb.ReleaseRequest(bad=[item]))


def test_slots_that_are_not_there(daemon: Daemon, session: RawSession) -> None:
    everywhere = np.zeros(32, EXTENT_DTYPE)
    everywhere["slot"] = np.geomspace(1, 0xFFFFFFFF, 32)
    with refused(daemon, Reason.BAD_EXTENTS):
        session.abort(everywhere)
    # A reader may report a block that has left meanwhile.
    session.call("Release", pb.ReleaseRequest(bad=[slots_of(everywhere)]))


def test_too_many_slots_and_ids(daemon: Daemon, session: RawSession) -> None:
    many = {"slots": bytes(4 * (KEYS_MAX + 1)), "generations": bytes(4 * (KEYS_MAX + 1))}
    ids = list(range(1, 4098))
    for method, request in (
        ("Release", pb.ReleaseRequest(bad=[many])),
        ("Release", pb.ReleaseRequest(bad=[{}] * 65)),
        ("Abort", pb.AbortRequest(groups=[{}] * 65)),
        ("Release", pb.ReleaseRequest(lease_ids=ids)),
        ("Abort", pb.AbortRequest(reservation_ids=ids)),
        ("Unpin", pb.UnpinRequest(pin_ids=ids)),
    ):
        with refused(daemon, Reason.TOO_MANY_KEYS):
            session.call(method, request)


# -- epochs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WITH_KEYS)
def test_a_stale_epoch(daemon: Daemon, session: RawSession, method: str) -> None:
    for epoch in (0, session.epoch + 1, (1 << 64) - 1):
        with refused(daemon, Reason.STALE_EPOCH) as caught:
            session.call(method, keys_request(method, epoch, [{}]))
        assert caught.value.details["epoch"] == str(session.epoch)


def test_the_epoch_moves_by_agreement(daemon: Daemon) -> None:
    with RawSession(daemon, contract=raw_contract(model="moves").to_json()) as session:
        keys, extents = session.store(2)[0], session.reserve(2)
        for expected in (0, session.epoch + 1, (1 << 64) - 1):
            with refused(daemon, Reason.STALE_EPOCH):
                session.call("BumpEpoch", pb.BumpEpochRequest(expected_epoch=expected))
        bump = pb.BumpEpochRequest(expected_epoch=session.epoch)
        bumped = session.call("BumpEpoch", bump).epoch
        assert bumped == session.epoch + 1
        for late in (lambda: session.commit(new_keys(2), extents), lambda: session.lookup(keys)):
            with refused(daemon, Reason.STALE_EPOCH):
                late()
        session.epoch = bumped
        assert session.lookup(keys).groups[0].present == b"\0"
        assert session.commit(keys, extents).stored[0].bits == b"\x03"


# -- leases and pins -----------------------------------------------------------------------------


def test_leases(daemon: Daemon, session: RawSession) -> None:
    keys, _ = session.store(2)
    other = RawSession(daemon)
    for lease_id in ((1 << 64) - 1, 1 << 63, 5):
        assert session.lookup(keys, lease_id=lease_id).lease_id == lease_id
    with refused(daemon, Reason.LEASE_EXISTS):
        session.lookup(keys, lease_id=5)
    with refused(daemon, Reason.TOO_MANY_LEASES):
        session.lookup(keys, lease_id=6)
    for thief, lease_id in ((other, 5), (session, 7), (session, 0)):
        with refused(daemon, Reason.UNKNOWN_LEASE):
            thief.call("Release", pb.ReleaseRequest(lease_ids=[lease_id]))
    assert daemon.stats().leases == LEASES_MAX
    # An unknown lease does not keep the others.
    every = pb.ReleaseRequest(lease_ids=[9, 5, 1 << 63, (1 << 64) - 1])
    for _ in range(2):
        with refused(daemon, Reason.UNKNOWN_LEASE):
            session.call("Release", every)
    assert daemon.stats().leases == 0
    # A release that overtook its lookup stays in force.
    withdrawn = session.lookup(keys, lease_id=9)
    assert (withdrawn.lease_id, withdrawn.groups[0].extents, daemon.stats().leases) == (0, b"", 0)
    other.close()


def test_a_report_of_bad_bytes_survives_an_unknown_lease(
    daemon: Daemon, session: RawSession
) -> None:
    # The checksums of these blocks are zeros, which match no bytes.
    keys, extents = session.store(2)
    failures = daemon.counters().get("checksum_failures{reader}", 0)
    many = slots_of(np.repeat(extents[:1], KEYS_MAX))
    with refused(daemon, Reason.UNKNOWN_LEASE):
        session.call("Release", pb.ReleaseRequest(lease_ids=[3], bad=[many]))
    assert session.lookup(keys).groups[0].present == b"\x02"
    assert daemon.counters()["checksum_failures{reader}"] == failures + 1


def test_a_lie_about_bad_bytes_removes_nothing(daemon: Daemon, neighbour: Engine) -> None:
    keys = new_keys(2)
    assert len(neighbour.store(keys).bound) == 2
    with RawSession(daemon, contract=contract_of(PAGE_BYTES).to_json()) as liar:
        found = liar.lookup(keys, lease_id=new_id())
        extents = np.frombuffer(found.groups[0].extents, EXTENT_DTYPE)
        assert len(extents) == 2
        liar.call("Release", pb.ReleaseRequest(lease_ids=[found.lease_id], bad=[slots_of(extents)]))
    with RawSession(daemon, contract=raw_contract(model="foreign").to_json()) as stranger:
        stranger.call("Release", pb.ReleaseRequest(bad=[slots_of(extents)]))
    assert neighbour.check(keys).right == keys


BAD_PINS: dict[str, tuple[dict[str, int], Reason]] = {
    "no id": ({"pin_id": 0}, Reason.BAD_MESSAGE),
    "an id of 64 bits": ({"pin_id": (1 << 64) - 1}, Reason.BAD_MESSAGE),
    "no time": ({"ttl_ms": 0}, Reason.BAD_TTL),
    "too long": ({"ttl_ms": 60_001}, Reason.BAD_TTL),
    "for ever": ({"ttl_ms": (1 << 64) - 1}, Reason.BAD_TTL),
}


@pytest.mark.parametrize("name", BAD_PINS)
def test_bad_pin(daemon: Daemon, session: RawSession, name: str) -> None:
    changes, reason = BAD_PINS[name]
    keys, _ = session.store(1)
    request = keys_request("Pin", session.epoch, [{"keys": keys[0]}])
    for field, value in changes.items():
        setattr(request, field, value)
    with refused(daemon, reason):
        session.call("Pin", request)
    assert daemon.stats().pins == 0


def test_pins(daemon: Daemon, session: RawSession) -> None:
    keys, _ = session.store(2)
    groups = [{"keys": b"".join(keys)}]
    pins = [keys_request("Pin", session.epoch, groups) for _ in range(PINS_MAX + 1)]
    assert session.call("Pin", pins[0]).pinned[0].bits == b"\x03"
    with refused(daemon, Reason.PIN_EXISTS):
        session.call("Pin", pins[0])
    session.call("Pin", pins[1])
    with refused(daemon, Reason.TOO_MANY_PINS):
        session.call("Pin", pins[2])
    mine = [pins[0].pin_id, pins[1].pin_id]
    with RawSession(daemon) as other, refused(daemon, Reason.UNKNOWN_PIN):
        other.call("Unpin", pb.UnpinRequest(pin_ids=mine))
    assert daemon.stats().pins == 2
    for _ in range(2):
        with refused(daemon, Reason.UNKNOWN_PIN):
            session.call("Unpin", pb.UnpinRequest(pin_ids=[0, *mine]))
    assert daemon.stats().pins == 0
