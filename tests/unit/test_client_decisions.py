"""The facade against a scripted daemon: the requests it sends, and failures as values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import attached
from support.fake_daemon import KEY_BYTES, extents, key, presence

from kvhearth.errors import Reason
from kvhearth.model import EXTENT_DTYPE
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.results import CommitGroup

KEYS = {0: [key(1), key(2), key(3)], 1: [key(4)]}


def hit(request: Any) -> pb.LookupResponse:
    """Two blocks of group 0 (two shards each) and one block of group 1."""
    groups = [
        presence(request.groups[0], leased=2, shards=2),
        presence(request.groups[1], leased=1, records=extents(1, first_slot=4)),
    ]
    return pb.LookupResponse(
        lease_id=request.lease_id, hit_tokens=32, groups=groups, eta_us=5, lease_short="held_cap"
    )


def released(daemon: Any) -> list[int]:
    return [number for request in daemon.requests["Release"] for number in request.lease_ids]


def test_a_hit_brings_extents_and_a_lease(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.answer("Lookup", hit)
        result = client.lookup(KEYS)
        assert (result.hit_tokens, result.eta_us, result.lease_short) == (32, 5, "held_cap")
        assert result.groups[0].leased.tolist() == [True, True, False]
        assert result.groups[0].tiers.tolist() == [1, 1, 0]
        assert result.groups[0].extents["slot"].tolist() == [0, 1, 2, 3]
        assert result.groups[1].extents.dtype == EXTENT_DTYPE
        assert result.lease is not None
        client.release(result.lease, bad=np.concatenate([extents(1, 4), extents(1, 2)]))
        request = client.clock.until(lambda: daemon.requests["Release"])[0]
        assert list(request.lease_ids) == [result.lease.id]
        slots = {group.group: np.frombuffer(group.slots, "<u4").tolist() for group in request.bad}
        assert slots == {0: [2], 1: [4]}
        counters = client.counters()
        assert (counters["lookup"], counters["lookup_hit_tokens"]) == (1, 32)
        client.release(None)


def test_the_arrays_of_a_hit_are_the_callers_own(tmp_path: Path) -> None:
    def whole(request: Any) -> pb.LookupResponse:
        groups = [presence(request.groups[0], leased=8, shards=2)]
        return pb.LookupResponse(lease_id=request.lease_id, hit_tokens=8 * 16, groups=groups)

    with attached(tmp_path) as (daemon, client):
        for _ in range(2):
            daemon.answer("Lookup", whole)
            found = client.lookup({0: [key(number) for number in range(8)]}).groups[0]
            flags = (found.present, found.ready, found.leased, found.tiers)
            assert [each.tolist() for each in flags] == [[True] * 8] * 3 + [[1] * 8]
            assert [each.dtype for each in flags] == [np.bool_] * 3 + [np.uint8]
            assert found.extents.tobytes() == extents(16).tobytes()
            # Writing to one of these arrays changes no other array, nor the next answer.
            for number, each in enumerate(flags):
                each[number] = 0
                assert [int(other.sum()) for other in flags] == [7] * (number + 1) + [8] * (
                    3 - number
                )
            found.extents["slot"] = 1


def test_without_a_lease_none_is_asked_for(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        assert client.lookup(KEYS, lease=False).lease is None
        assert daemon.requests["Lookup"][0].lease_id == 0


def test_a_late_lookup_is_a_miss_whose_lease_is_released(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("Lookup", Reason.DEADLINE)
        result = client.lookup(KEYS)
        assert (result.reason, result.lease) == (Reason.DEADLINE, None)
        assert result.groups[0].present.tolist() == [False] * 3
        client.clock.until(lambda: released(daemon))
        assert released(daemon) == [daemon.requests["Lookup"][0].lease_id]
        assert client.counters()["fail_open_deadline"] == 1


def _reply(change: Callable[[pb.LookupResponse], None]) -> Callable[[Any], pb.LookupResponse]:
    def answer(request: Any) -> pb.LookupResponse:
        reply = hit(request)
        change(reply)
        return reply

    return answer


def _set(index: int, **values: Any) -> Callable[[Any], pb.LookupResponse]:
    def change(reply: pb.LookupResponse) -> None:
        for name, value in values.items():
            setattr(reply.groups[index], name, value)

    return _reply(change)


def _with(**fields: Any) -> bytes:
    records = extents(4)
    for name, value in fields.items():
        records[name][-1] = value
    return records.tobytes()


@pytest.mark.parametrize(
    "answer",
    [
        _set(0, present=b""),
        _set(0, ready=b"\0\0"),
        _set(0, tiers=b"\1"),
        _set(0, tiers=b"\1\1\x09"),
        _set(0, extents=extents(3).tobytes()),
        _set(0, leased=b"\x07"),
        _set(0, group=1),
        _set(0, group=9),
        _set(0, extents=_with(segment=2)),
        _set(0, extents=_with(offset=64 * 1024 - 4095)),
        _set(0, extents=_with(offset=(1 << 64) - 1)),
        _set(0, extents=_with(length=1)),
        _set(0, extents=_with(slot=999)),
        _reply(lambda reply: reply.groups.pop()),
        _reply(lambda reply: reply.groups.add(group=2)),
        _reply(lambda reply: setattr(reply, "lease_id", 1)),
    ],
)
def test_a_reply_that_makes_no_sense_is_a_miss(tmp_path: Path, answer: Any) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.answer("Lookup", answer)
        result = client.lookup(KEYS)
        assert (result.reason, result.hit_tokens, result.lease) == (Reason.BAD_MESSAGE, 0, None)
        client.clock.until(lambda: released(daemon))
        assert released(daemon) == [daemon.requests["Lookup"][0].lease_id]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({0: [b"short"]}, Reason.BAD_KEYS),
        ({0: [key(1), key(2)[:-1]]}, Reason.BAD_KEYS),
        ({0: ["x" * KEY_BYTES]}, Reason.BAD_KEYS),
        ({2: [key(1)]}, Reason.BAD_GROUP),
        ({-1: [key(1)]}, Reason.BAD_GROUP),
    ],
)
def test_arguments_are_checked_before_they_travel(
    tmp_path: Path, groups: Any, reason: Reason
) -> None:
    with attached(tmp_path) as (daemon, client):
        assert client.lookup(groups).reason == reason
        assert client.prefetch(groups).reason == reason
        assert client.pin(groups, 1.0).reason == reason
        client.touch(groups)
        for rpc in ("Lookup", "Prefetch", "Pin", "Touch"):
            assert daemon.requests[rpc] == []


def test_more_keys_than_one_call_takes(tmp_path: Path) -> None:
    names = {0: [key(n) for n in range(96)], 1: [key(n) for n in range(32)]}
    with attached(tmp_path) as (daemon, client):
        result = client.lookup(names)
        assert result.reason == ""
        assert [len(item.present) for item in result.groups.values()] == [96, 32]
        asked = [
            (group.group, len(group.keys) // KEY_BYTES, request.portion)
            for request in daemon.requests["Lookup"]
            for group in request.groups
        ]
        assert asked == [(0, 64, True), (0, 32, True), (1, 32, True)]


def test_a_lookup_that_fails_after_a_portion_releases_its_lease(tmp_path: Path) -> None:
    def lease(request: Any) -> Any:
        groups = [presence(request.groups[0], leased=4, shards=2)]
        return pb.LookupResponse(lease_id=request.lease_id, hit_tokens=64, groups=groups)

    with attached(tmp_path) as (daemon, client):
        daemon.answer("Lookup", lease)
        daemon.refuse_next("Lookup", Reason.TOO_MANY_LEASES)
        assert client.lookup({0: [key(n) for n in range(96)]}).reason == Reason.TOO_MANY_LEASES
        first = daemon.requests["Lookup"][0]
        client.clock.until(lambda: daemon.requests["Release"])
        assert released(daemon) == [first.lease_id]


def test_no_keys_ask_nothing(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        assert client.lookup({0: []}).reason == ""
        assert daemon.requests["Lookup"] == []


@pytest.mark.parametrize(
    "grants",
    [
        [types_pb2.GroupExtents(group=0, count=9, extents=extents(18).tobytes())],
        [types_pb2.GroupExtents(group=0, count=1, extents=b"")],
        [types_pb2.GroupExtents(group=1, count=1, extents=extents(1).tobytes())],
        [types_pb2.GroupExtents(group=5)],
        [types_pb2.GroupExtents(group=0), types_pb2.GroupExtents(group=0)],
    ],
)
def test_a_senseless_reservation_is_given_back_by_its_id(tmp_path: Path, grants: Any) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.answer("Reserve", lambda _: pb.ReserveResponse(groups=grants))
        reservation = client.reserve({0: 3})
        assert (reservation.reason, reservation.boot_id) == (Reason.BAD_MESSAGE, "")
        assert reservation.groups[0].shape == (0, 2)
        abort = client.clock.until(lambda: daemon.requests["Abort"])[0]
        assert list(abort.reservation_ids) == [daemon.requests["Reserve"][0].reservation_id]


def commit_of(count: int) -> CommitGroup:
    return CommitGroup(
        [key(number) for number in range(count)],
        extents(count * 2, generation=3).reshape(count, 2),
        np.full((count, 2, 16), 5, np.uint8),
        parent=key(99),
    )


def test_a_commit_without_an_answer_gives_its_slots_back(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("Commit", Reason.DEADLINE)
        result = client.commit({0: commit_of(2)}, boot_id=daemon.boot_id)
        assert (result.reason, result.stored[0].tolist()) == (Reason.DEADLINE, [False, False])
        abort = client.clock.until(lambda: daemon.requests["Abort"])[0]
        assert np.frombuffer(abort.groups[0].slots, "<u4").tolist() == [0, 1, 2, 3]
        assert not abort.in_doubt


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (CommitGroup([key(1)], extents(1)), Reason.BAD_EXTENTS),
        (CommitGroup([key(1)], np.zeros(2, np.uint8)), Reason.BAD_EXTENTS),
        (CommitGroup([key(1)], extents(2), np.zeros(31, np.uint8)), Reason.BAD_CHECKSUMS),
        (CommitGroup([key(1)], extents(2), parent=b"x"), Reason.BAD_KEYS),
    ],
)
def test_commits_are_checked_before_they_travel(
    tmp_path: Path, item: CommitGroup, reason: Reason
) -> None:
    with attached(tmp_path) as (daemon, client):
        result = client.commit({0: item}, boot_id=daemon.boot_id)
        assert result.reason == reason
        assert not result.stored[0].any()
        assert daemon.requests["Commit"] == []


def test_extents_of_another_boot_are_dropped(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        result = client.commit({0: commit_of(2)}, boot_id="another")
        assert (result.reason, result.stored[0].tolist()) == (Reason.STALE_BOOT, [False, False])
        assert client.abort({0: extents(2)}, boot_id="another") == Reason.STALE_BOOT
        assert client.abort({0: extents(1)}, boot_id=daemon.boot_id) == ""
        client.clock.until(lambda: daemon.requests["Abort"])
    assert [len(request.groups[0].slots) for request in daemon.requests["Abort"]] == [4]
    assert daemon.requests["Commit"] == []


def test_pins_touches_and_prefetches(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        bits = types_pb2.GroupBitmap(group=1, bits=b"\1")
        daemon.answer("Pin", lambda _: pb.PinResponse(pinned=[bits]))
        pin = client.pin({1: [key(4)]}, ttl_s=1.5)
        assert (pin.reason, pin.pinned[1].tolist()) == ("", [True])
        assert daemon.requests["Pin"][0].ttl_ms == 1500
        client.unpin(pin)
        unpin = client.clock.until(lambda: daemon.requests["Unpin"])[0]
        assert list(unpin.pin_ids) == list(pin.ids)
        client.touch(KEYS)
        assert len(client.clock.until(lambda: daemon.requests["Touch"])[0].groups) == 2
        found = client.prefetch(KEYS)
        assert (found.reason, found.groups[0].tiers.tolist()) == ("", [0, 0, 0])
        daemon.answer("Pin", lambda _: pb.PinResponse())
        lost = client.pin({1: [key(4)]}, ttl_s=1)
        assert (lost.reason, lost.pinned[1].tolist()) == (Reason.BAD_MESSAGE, [False])
        client.clock.until(lambda: len(daemon.requests["Unpin"]) == 2)


def test_the_epoch_follows_this_engines_weights_only(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        assert client.epoch == 7
        daemon.epoch = 9
        beats = len(daemon.requests["Heartbeat"])
        client.clock.until(lambda: len(daemon.requests["Heartbeat"]) > beats + 1)
        assert client.epoch == 7
        assert client.bump_epoch() == 10
        assert daemon.requests["BumpEpoch"][-1].expected_epoch == 9
        assert client.bump_epoch(expected=20) == 21
        client.lookup(KEYS)
        assert daemon.requests["Lookup"][-1].epoch == 21
        client.use_epoch(30)
        assert client.epoch == 30


def test_a_namespace_is_dropped_only_by_who_is_alone(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("BumpEpoch", Reason.NAMESPACE_SHARED)
        assert not client.drop_if_alone()
        assert daemon.requests["BumpEpoch"][-1].only_alone
        assert client.epoch == 7
        assert client.lookup(KEYS).reason == ""
        assert client.drop_if_alone()
        assert client.epoch == 8
        client.bump_epoch()
        assert not daemon.requests["BumpEpoch"][-1].only_alone


def test_a_drop_whose_answer_is_lost_leaves_no_epoch(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("BumpEpoch", Reason.DEADLINE)
        assert not client.drop_if_alone()
        assert client.epoch == -1


def test_new_weights_without_an_epoch_find_nothing(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("BumpEpoch", Reason.STALE_EPOCH)
        assert client.bump_epoch() == client.epoch == -1
        assert client.lookup(KEYS).reason == Reason.STALE_EPOCH
        assert client.reserve({0: 1}).reason == Reason.STALE_EPOCH
        result = client.commit({0: commit_of(1)}, boot_id=daemon.boot_id)
        assert result.reason == Reason.STALE_EPOCH
        client.clock.until(lambda: daemon.requests["Abort"])
        assert daemon.requests["Lookup"] == daemon.requests["Commit"] == []
        assert client.bump_epoch() == 8
        assert client.lookup(KEYS).reason == ""


def test_a_silent_daemon_soon_costs_nothing(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        for _ in range(3):
            daemon.refuse_next("Lookup", Reason.DEADLINE)
        for _ in range(3):
            assert client.lookup(KEYS).reason == Reason.DEADLINE
        asked = len(daemon.requests["Lookup"])
        for _ in range(100):
            assert client.lookup(KEYS).reason == Reason.DAEMON_AWAY
        assert len(daemon.requests["Lookup"]) == asked, "nobody is asked, so nobody is waited for"
        client.clock.pass_time(1.0)
        assert client.lookup(KEYS).reason == ""


def test_only_the_scheduler_decides(tmp_path: Path) -> None:
    with attached(tmp_path, scheduler=False, rank=1) as (daemon, client):
        assert client.lookup(KEYS).reason == Reason.NOT_SCHEDULER
        assert daemon.hellos[0].rank == 1
        assert not daemon.hellos[0].scheduler
        assert client.arena is not None


def test_a_refused_batch_is_sent_one_by_one(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.refuse_next("Abort", Reason.NOT_RESERVED)
        daemon.refuse_next("Abort", Reason.NOT_RESERVED)
        for number in range(3):
            client.abort({1: extents(1, number)}, boot_id=daemon.boot_id)
        client.clock.until(lambda: len(daemon.requests["Abort"]) == 4)
        assert [len(request.groups) for request in daemon.requests["Abort"]] == [3, 1, 1, 1]
        client.clock.until(lambda: client.counters().get("errands_refused") == 1)


def test_a_lease_that_was_not_known_holds_up_no_other(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.answer("Lookup", hit)
        lease = client.lookup(KEYS).lease
        daemon.refuse_next("Release", Reason.UNKNOWN_LEASE)
        client.release(lease)
        client.clock.until(lambda: client.counters().get("errands_unknown") == 1)
        assert len(daemon.requests["Release"]) == 1


@pytest.mark.parametrize("groups", [None, 5, {0: None}, {"x": [key(1)]}, [key(1)], {0: 3}])
def test_arguments_of_a_wrong_type_are_an_answer(tmp_path: Path, groups: Any) -> None:
    with attached(tmp_path) as (daemon, client):
        assert client.lookup(groups).reason == Reason.BAD_MESSAGE
        assert client.prefetch(groups).reason == Reason.BAD_MESSAGE
        assert client.pin(groups, 1.0).reason == Reason.BAD_MESSAGE
        client.touch(groups)
        wrong = {0: "x"} if groups == {0: 3} else groups
        assert client.reserve(wrong).reason == Reason.BAD_MESSAGE
        assert client.commit(groups, boot_id=daemon.boot_id).reason == Reason.BAD_MESSAGE
        assert client.abort(groups, boot_id=daemon.boot_id) != ""
        client.close()
        assert client.lookup(groups).reason == Reason.CLOSED


def test_a_report_of_bad_blocks_fits_one_call(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        daemon.answer("Lookup", hit)
        lease = client.lookup(KEYS).lease
        client.release(lease, bad={0: extents(60), 1: extents(60)})
        request = client.clock.until(lambda: daemon.requests["Release"])[0]
        assert [len(group.slots) // 4 for group in request.bad] == [60, 4]
