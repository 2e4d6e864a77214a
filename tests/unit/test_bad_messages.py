"""Bad messages of a peer, in process: each has its reason, and none has another effect."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.core_kit import contract, full, key, keys
from support.core_shell import Shell
from support.raw_door import commit_group, fat_contract, raw_contract, raw_hello, slots_of

from kvhearth.contract import CONTRACT_PARTS_MAX
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, I64, Records, unpack_bits
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.frames import METHODS
from kvhearth.wire.handshake import (
    FRAME_BYTES_MAX,
    HELLO_PARTS_MAX,
    FrameDecoder,
    Hello,
)
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.transport.dispatch import Dispatcher

KEYS_MAX, LEASES_MAX, PINS_MAX = 64, 3, 2
HUGE = (1 << 64) - 1
WITH_KEYS = ("Lookup", "Prefetch", "Pin", "Touch", "Commit")


def reason_of(action: Callable[[], object]) -> str:
    """Return the reason of a refusal; empty if there is none."""
    try:
        action()
    except KVHearthError as error:
        return str(error.reason)
    return ""


# -- the first frame -------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    """Return a frame with this body."""
    return struct.pack("<I", len(body)) + body


BAD_FRAMES = {
    "garbage": b"\xff\x13\x37\xab" * 1000,
    "http": b"GET / HTTP/1.1\r\nHost: kvhearth\r\n\r\n",
    "length of 4 GiB": struct.pack("<I", 0xFFFFFFFF),
    "length just too large": struct.pack("<I", FRAME_BYTES_MAX + 1),
    "empty": frame(b""),
    "not JSON": frame(b"hello"),
    "cut JSON": frame(b'{"kind":"hello"'),
    "not UTF-8": frame(b'{"kind":"\xff\xfe"}'),
    "a list": frame(b"[]"),
    "a number": frame(b"7"),
    "a long number": frame(b"1" * 200_000),
    "a text": frame(b'"hello"'),
    "nested lists": frame(b"[" * 200_000),
    "nested objects": frame(b'{"a":' * 40_000),
    "objects that take long to parse": frame(b'{"x":[' + b"{}," * HELLO_PARTS_MAX + b"0]}"),
}


def test_bad_frames() -> None:
    for name, data in BAD_FRAMES.items():
        decoder = FrameDecoder(FRAME_BYTES_MAX, HELLO_PARTS_MAX)
        assert reason_of(lambda d=decoder, b=data: d.feed(b)) == Reason.BAD_MESSAGE, name


BAD_HELLOS: dict[str, dict[str, Any]] = {
    "another kind": {"kind": "welcome"},
    "unknown field": {"surprise": 1},
    "long unknown field": {"x" * 100_000: 1},
    "no engine id": {"engine_id": ...},
    "no contract": {"contract": ...},
    "no protocol": {"protocol": ...},
    "rank is a text": {"rank": "0"},
    "rank is a truth": {"rank": True},
    "rank is a fraction": {"rank": 0.0},
    "rank is not a number": {"rank": float("nan")},
    "rank of 70 bits": {"rank": 1 << 70},
    "rank out of range": {"rank": 1},
    "rank below -1": {"rank": -2},
    "worker without a rank": {"scheduler": False, "rank": -1},
    "scheduler is a number": {"scheduler": 1},
    "contract is an object": {"contract": {}},
    "engine id is null": {"engine_id": None},
    "engine id is empty": {"engine_id": ""},
    "engine id is too long": {"engine_id": "e" * 257},
    "engine id breaks lines": {"engine_id": "a\nb"},
    "engine id is half a character": {"engine_id": "\ud800"},
    "tenant is a number": {"tenant": 7},
}


def shell_of(**limits: Any) -> Shell:
    """Return an engine with a tenant of 4 MiB, whose slots have 4 KiB."""
    return Shell(Geometry.of([("t", 4 << 20)], 1 << 16, 4096), Limits(**limits))


def admitted(engine: Any, **changes: Any) -> None:
    """Attach with a changed hello."""
    hello = Hello.from_message(json.loads(json.dumps(raw_hello(**changes))))
    engine.attach(hello, None, "t")


def test_bad_hellos() -> None:
    engine = shell_of().engine
    for name, changes in BAD_HELLOS.items():
        assert reason_of(lambda c=changes: admitted(engine, **c)) == Reason.BAD_MESSAGE, name
    for version in (0, PROTOCOL_VERSION + 1, -(1 << 63)):
        refusal = reason_of(lambda v=version: admitted(engine, protocol=v))
        assert refusal == Reason.PROTOCOL_VERSION
    assert len(engine.sessions) == 0


def test_bad_contracts_of_a_hello() -> None:
    good = json.loads(raw_contract().to_json())
    group = good["groups"][0]
    engine = shell_of().engine
    cases = {
        "65 KiB": {**good, "model": "m" * (65 << 10)},
        "half a character": {**good, "model": "\ud800"},
        "an unknown dtype": {**good, "kv_dtype": "int3"},
        "a page that no slab can hold": {**good, "groups": [{**group, "page_bytes": 3 << 20}]},
        "a word longer than a refusal": {
            **good,
            "groups": [{**group, "kind": "\U0001f525" * 9000}],
        },
        "longer when it is written out": fat_contract(0),
    }
    for name, case in cases.items():
        text = json.dumps(case, ensure_ascii=name != "longer when it is written out")
        refusal = reason_of(lambda t=text: admitted(engine, contract=t))
        assert refusal == Reason.BAD_CONTRACT, name
    # Its brackets are escaped, thus the frame around it has few.
    escaped = "\\u005b" + "\\u005b\\u005d\\u002c" * 14_000 + "0\\u005d"
    body = json.dumps(raw_hello(contract="@")).replace("@", escaped)
    (message,) = FrameDecoder(FRAME_BYTES_MAX, HELLO_PARTS_MAX).feed(frame(body.encode()))
    with pytest.raises(KVHearthError, match=f"more than {CONTRACT_PARTS_MAX}"):
        engine.attach(Hello.from_message(message), None, "t")


def test_a_place_in_a_group_is_taken_once() -> None:
    """A second replica under the same engine id must not take a place of the first one."""
    shell = shell_of()
    pair = contract(full(shards=2), tensor_parallel=2)
    first = shell.attach(pair, "t", process_group="first", rank=0)
    for place in ({"rank": 1}, {"rank": 0, "scheduler": False}, {"rank": -1}):
        taken = lambda p=place: shell.attach(pair, "t", process_group="first", **p)  # noqa: E731
        assert reason_of(taken) == Reason.RANK_TAKEN, place
    for group in ("second", ""):
        with pytest.raises(KVHearthError, match=r"runs already in other processes.*of its own"):
            shell.attach(pair, "t", process_group=group, rank=1, scheduler=False)
    complete = shell.engine.core.state.group_of(first.session.number)
    assert not complete.complete
    shell.attach(pair, "t", process_group="first", rank=1, scheduler=False)
    assert complete.complete


def test_an_incarnation_is_that_of_the_group_now() -> None:
    shell = shell_of()
    number = (first := shell.attach(contract(), "t", map_arena=False)).welcome.incarnation
    again = lambda n: shell.attach(contract(), "t", incarnation=n, scheduler=False)  # noqa: E731
    assert reason_of(lambda: again(number + 1)) == Reason.STALE_INCARNATION
    shell.engine.leave(first.session, finished=True)
    for stale in (number, -1, (1 << 63) - 1):
        assert reason_of(lambda n=stale: again(n)) == Reason.STALE_INCARNATION
    assert shell.attach(contract(), "t").welcome.incarnation == number + 1


# -- calls -----------------------------------------------------------------------------------------


class Caller:
    """A session of an engine, whose calls are requests in bytes."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        bounds = {"keys_max": KEYS_MAX, "leases_max": LEASES_MAX, "pins_max": PINS_MAX}
        shell = shell_of(
            **bounds, pin_ttl_max_s=60.0, held_fraction_max=1.0, stock_fraction_max=1.0
        )
        self.engine = shell.engine
        self.sessions = [
            shell.attach(made, "t", engine_id=name, map_arena=False).session
            for name, made in (("e", contract(full(), full(8192))), ("other", contract(full())))
        ]
        self.dispatcher = Dispatcher(self.engine, self._verify)

    async def _verify(self, _: list[I64]) -> int:
        return 0

    @property
    def epoch(self) -> int:
        """The namespace's epoch."""
        return next(iter(self.engine.core.state.namespaces)).epoch

    def call(self, method: str, request: Any, *, other: bool = False) -> Any:
        """Make a call, or one of another namespace's engine; the books must balance after it.

        Raises:
            KVHearthError: the refusal.
        """
        parsed = self.dispatcher.parse(method, request.SerializeToString())
        try:
            answer = self.dispatcher.decide(method, parsed, self.sessions[other])
            return asyncio.run(_awaited(answer)) if isawaitable(answer) else answer
        finally:
            self.engine.core.check_books()

    def named(self, method: str, groups: list[Mapping[str, Any]], **fields: Any) -> Any:
        """Return the request of a call that names keys."""
        if method == "Pin":
            fields = {"pin_id": next(self.numbers), "ttl_ms": 1000, **fields}
        made = getattr(pb, f"{method}Request")(**{"epoch": self.epoch, **fields})
        for group in groups:
            made.groups.add(**group)
        return made

    def reserve(self, count: int) -> Records:
        """Return reserved extents of group 0."""
        request = pb.ReserveRequest(
            reservation_id=next(self.numbers), epoch=self.epoch, groups=[{"count": count}]
        )
        found = self.call("Reserve", request).groups[0].extents
        return np.frombuffer(found, EXTENT_DTYPE)

    def commit(self, names: list[bytes], extents: Records, **changes: Any) -> list[bool]:
        """Commit blocks; return which of them are stored."""
        group = commit_group(names, extents, **changes)
        reply = self.call("Commit", pb.CommitRequest(epoch=self.epoch, groups=[group]))
        return unpack_bits(reply.stored[0].bits, len(names)).tolist()  # type: ignore[no-any-return]

    def lookup(self, names: list[bytes], *, other: bool = False, **fields: Any) -> Any:
        """Look up keys of group 0."""
        request = self.named("Lookup", [{"keys": b"".join(names)}], **fields)
        return self.call("Lookup", request, other=other)

    def refused(self, method: str, request: Any, *, other: bool = False) -> str:
        """Return the reason of a refusal; empty if there is none."""
        return reason_of(lambda: self.call(method, request, other=other))


async def _awaited(answer: Any) -> Any:
    return await answer


@pytest.fixture
def caller() -> Iterator[Caller]:
    """A caller that leaves nothing reserved."""
    made = Caller()
    yield made
    made.engine.core.check_books()


def test_bytes_that_are_no_message(caller: Caller) -> None:
    for method in METHODS:
        for data in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 5000):
            refusal = reason_of(lambda m=method, d=data: caller.dispatcher.parse(m, d))
            assert refusal == Reason.BAD_MESSAGE, (method, data[:9])


def test_a_token_of_nobody(caller: Caller) -> None:
    for token in ("", "0" * 64, "x"):
        assert reason_of(lambda t=token: caller.dispatcher.admit(t)) == Reason.UNKNOWN_TOKEN


BAD_KEYS: dict[str, tuple[list[Mapping[str, Any]], Reason]] = {
    "a torn key": ([{"keys": bytes(33)}], Reason.BAD_KEYS),
    "one byte": ([{"keys": b"k"}], Reason.BAD_KEYS),
    "too many keys": ([{"keys": bytes(32 * (KEYS_MAX + 1))}], Reason.TOO_MANY_KEYS),
    "too many keys together": (
        [{"group": 0, "keys": bytes(32 * KEYS_MAX)}, {"group": 1, "keys": bytes(32)}],
        Reason.TOO_MANY_KEYS,
    ),
    "65 groups": ([{}] * 65, Reason.BAD_GROUP),
    "a group that is not there": ([{"group": 2}], Reason.BAD_GROUP),
    "a group of 32 bits": ([{"group": 0xFFFFFFFF}], Reason.BAD_GROUP),
}


def test_bad_keys_of_every_call(caller: Caller) -> None:
    for method in WITH_KEYS:
        for name, (groups, reason) in BAD_KEYS.items():
            found = caller.refused(method, caller.named(method, groups))
            assert found == reason, (method, name)
        for epoch in (0, caller.epoch + 1, HUGE):
            stale = caller.named(method, [{}], epoch=epoch)
            assert caller.refused(method, stale) == Reason.STALE_EPOCH, (method, epoch)
        for groups in ([], [{"group": 0}], [{"group": 1}, {"group": 0}]):
            request = caller.named(method, groups)
            caller.call(method, request)
            if method == "Pin":
                caller.call("Unpin", pb.UnpinRequest(pin_ids=[request.pin_id]))
    twice: list[Mapping[str, Any]] = [{"group": 1, "keys": bytes(32)}] * 2
    for method in ("Lookup", "Prefetch", "Touch"):
        assert caller.refused(method, caller.named(method, twice)) == Reason.BAD_GROUP


BAD_RESERVES: dict[str, tuple[dict[str, Any], Reason]] = {
    "no id": ({"reservation_id": 0}, Reason.BAD_MESSAGE),
    "an id of 64 bits": ({"reservation_id": HUGE}, Reason.BAD_MESSAGE),
    "too many": ({"groups": [{"count": KEYS_MAX + 1}]}, Reason.TOO_MANY_KEYS),
    "a count of 32 bits": ({"groups": [{"count": 0xFFFFFFFF}]}, Reason.TOO_MANY_KEYS),
    "too many together": ({"groups": [{"count": 40}] * 2}, Reason.TOO_MANY_KEYS),
    "65 groups": ({"groups": [{}] * 65}, Reason.BAD_GROUP),
    "a group that is not there": ({"groups": [{"group": 2, "count": 1}]}, Reason.BAD_GROUP),
    "a stale epoch": ({"epoch": 0}, Reason.STALE_EPOCH),
    "an epoch to come": ({"epoch": HUGE}, Reason.STALE_EPOCH),
}


def test_bad_reservations(caller: Caller) -> None:
    good = {"reservation_id": 7, "epoch": caller.epoch, "groups": [{"count": 3}]}
    for name, (changes, reason) in BAD_RESERVES.items():
        request = pb.ReserveRequest(**{**good, **changes})
        assert caller.refused("Reserve", request) == reason, name
    first, second = (caller.call("Reserve", pb.ReserveRequest(**good)) for _ in range(2))
    assert first.groups == second.groups, "a reservation asked for twice is one"
    freed = caller.call("Abort", pb.AbortRequest(reservation_ids=[7]))
    assert (freed.freed_slots, freed.quarantined_slots) == (3, 0)


def with_(extents: Records, **columns: Any) -> Records:
    """Return the extents with other values in their first row."""
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


def test_a_bad_commit_binds_nothing_and_its_slots_stay_usable(caller: Caller) -> None:
    names, extents = keys(1, 2), caller.reserve(2)
    for name, (change, reason) in BAD_COMMITS.items():
        bad = lambda c=change: caller.commit(names, extents, **c(extents))  # noqa: E731
        assert reason_of(bad) == reason, name
    torn = commit_group([key(3)], extents[:1], checksums=bytes(15))
    twice = commit_group([key(3)], extents[:1])
    for spoiler, reason in ((torn, Reason.BAD_CHECKSUMS), (twice, Reason.BAD_EXTENTS)):
        both = pb.CommitRequest(epoch=caller.epoch, groups=[commit_group(names, extents), spoiler])
        assert caller.refused("Commit", both) == reason
    assert not any(caller.lookup(names).groups[0].present)
    assert caller.commit(names, extents) == [True, True]


def test_what_was_committed_is_committed_once(caller: Caller) -> None:
    names, extents = keys(1, 2), caller.reserve(2)
    caller.commit(names, extents)
    for again in (names, keys(3, 4)):
        refusal = reason_of(lambda a=again: caller.commit(a, extents))
        assert refusal == Reason.ALREADY_COMMITTED
    abort = pb.AbortRequest(groups=[slots_of(extents)])
    assert caller.refused("Abort", abort) == Reason.ALREADY_COMMITTED
    assert caller.lookup(names).groups[0].present == b"\x03"
    # A known key is no mistake: its new slot is free again.
    assert caller.commit(names, caller.reserve(2)) == [False, False]
    assert caller.commit([key(5), key(5)], caller.reserve(2)) == [True, False]


def test_extents_of_another_namespace(caller: Caller) -> None:
    extents = caller.reserve(2)
    abort = pb.AbortRequest(groups=[slots_of(extents)])
    theirs = pb.CommitRequest(epoch=caller.epoch, groups=[commit_group(keys(1, 2), extents)])
    for method, request in (("Commit", theirs), ("Abort", abort)):
        assert caller.refused(method, request, other=True) == Reason.FOREIGN_EXTENT
    assert caller.call("Abort", abort).freed_slots == 2
    assert caller.refused("Abort", abort) == Reason.NOT_RESERVED


def test_slots_in_doubt_wait_for_a_second_word(caller: Caller) -> None:
    extents = caller.reserve(2)
    abort = pb.AbortRequest(groups=[slots_of(extents)], in_doubt=True)
    doubt = caller.call("Abort", abort)
    assert (doubt.freed_slots, doubt.quarantined_slots) == (0, 2)
    late = pb.CommitRequest(epoch=caller.epoch, groups=[commit_group(keys(1, 2), extents)])
    assert caller.refused("Commit", late) == Reason.NOT_RESERVED
    abort.in_doubt = False
    assert caller.call("Abort", abort).freed_slots == 2


BAD_SLOTS: dict[str, dict[str, Any]] = {
    "torn slots": {"slots": bytes(5), "generations": bytes(4)},
    "torn generations": {"slots": bytes(4), "generations": bytes(5)},
    "a generation too few": {"slots": bytes(8), "generations": bytes(4)},
    "no slots": {"slots": b"", "generations": bytes(4)},
}


def test_bad_slots(caller: Caller) -> None:
    for name, item in BAD_SLOTS.items():
        for method, field in (("Abort", "groups"), ("Release", "bad")):
            request = getattr(pb, f"{method}Request")(**{field: [item]})
            assert caller.refused(method, request) == Reason.BAD_EXTENTS, (name, method)
    everywhere = np.zeros(32, EXTENT_DTYPE)
    everywhere["slot"] = np.geomspace(1, 0xFFFFFFFF, 32)
    nowhere = pb.AbortRequest(groups=[slots_of(everywhere)])
    assert caller.refused("Abort", nowhere) == Reason.BAD_EXTENTS
    # A reader may report a block that has left meanwhile.
    caller.call("Release", pb.ReleaseRequest(bad=[slots_of(everywhere)]))


def test_too_much_at_once(caller: Caller) -> None:
    many = {"slots": bytes(4 * (KEYS_MAX + 1)), "generations": bytes(4 * (KEYS_MAX + 1))}
    ids = list(range(1, 4098))
    for method, request, reason in (
        ("Release", pb.ReleaseRequest(bad=[many]), Reason.TOO_MANY_KEYS),
        ("Release", pb.ReleaseRequest(bad=[{}] * 65), Reason.TOO_MANY_KEYS),
        ("Abort", pb.AbortRequest(groups=[{}] * 65), Reason.TOO_MANY_KEYS),
        ("Release", pb.ReleaseRequest(lease_ids=ids), Reason.TOO_MANY_KEYS),
        ("Release", pb.ReleaseRequest(cancelled_ids=ids), Reason.TOO_MANY_KEYS),
        ("Abort", pb.AbortRequest(reservation_ids=ids), Reason.TOO_MANY_KEYS),
        ("Unpin", pb.UnpinRequest(pin_ids=ids), Reason.TOO_MANY_KEYS),
        ("Heartbeat", pb.HeartbeatRequest(counters={f"c{i}": i for i in range(65)}),
         Reason.BAD_MESSAGE),
    ):  # fmt: skip
        assert caller.refused(method, request) == reason, method


def test_the_epoch_moves_by_agreement(caller: Caller) -> None:
    names, extents = keys(1, 2), caller.reserve(2)
    for expected in (0, caller.epoch + 1, HUGE):
        bump = pb.BumpEpochRequest(expected_epoch=expected)
        assert caller.refused("BumpEpoch", bump) == Reason.STALE_EPOCH
    before = caller.epoch
    bump = pb.BumpEpochRequest(expected_epoch=before)
    assert caller.call("BumpEpoch", bump).epoch == before + 1 == caller.epoch
    late = pb.CommitRequest(epoch=before, groups=[commit_group(names, extents)])
    assert caller.refused("Commit", late) == Reason.STALE_EPOCH
    assert caller.commit(names, extents) == [True, True]


def test_leases(caller: Caller) -> None:
    names = keys(1, 2)
    caller.commit(names, caller.reserve(2))
    for lease_id in (HUGE, 1 << 63, 5):
        assert caller.lookup(names, lease_id=lease_id).lease_id == lease_id
    for lease_id, reason in ((5, Reason.LEASE_EXISTS), (6, Reason.TOO_MANY_LEASES)):
        assert reason_of(lambda n=lease_id: caller.lookup(names, lease_id=n)) == reason
    for other, lease_id in ((True, 5), (False, 7), (False, 0)):
        release = pb.ReleaseRequest(lease_ids=[lease_id])
        assert caller.refused("Release", release, other=other) == Reason.UNKNOWN_LEASE
    # An unknown lease does not keep the others, nor a report of wrong bytes beside it.
    every = pb.ReleaseRequest(lease_ids=[9, 5, 1 << 63, HUGE])
    for _ in range(2):
        assert caller.refused("Release", every) == Reason.UNKNOWN_LEASE
    # A release that overtook its lookup stays in force.
    withdrawn = caller.lookup(names, lease_id=9)
    assert (withdrawn.lease_id, withdrawn.groups[0].extents) == (0, b"")


def test_pins(caller: Caller) -> None:
    names = keys(1, 2)
    caller.commit(names, caller.reserve(2))
    groups: list[Mapping[str, Any]] = [{"keys": b"".join(names)}]
    for changes, reason in (
        ({"pin_id": 0}, Reason.BAD_MESSAGE),
        ({"pin_id": HUGE}, Reason.BAD_MESSAGE),
        ({"ttl_ms": 0}, Reason.BAD_TTL),
        ({"ttl_ms": 60_001}, Reason.BAD_TTL),
        ({"ttl_ms": HUGE}, Reason.BAD_TTL),
    ):
        assert caller.refused("Pin", caller.named("Pin", groups, **changes)) == reason, changes
    pins = [caller.named("Pin", groups) for _ in range(PINS_MAX + 1)]
    assert caller.call("Pin", pins[0]).pinned[0].bits == b"\x03"
    assert caller.refused("Pin", pins[0]) == Reason.PIN_EXISTS
    caller.call("Pin", pins[1])
    assert caller.refused("Pin", pins[2]) == Reason.TOO_MANY_PINS
    mine = pb.UnpinRequest(pin_ids=[0, pins[0].pin_id, pins[1].pin_id])
    assert caller.refused("Unpin", mine, other=True) == Reason.UNKNOWN_PIN
    assert caller.refused("Pin", pins[1]) == Reason.PIN_EXISTS, "another engine's stay"
    assert caller.refused("Unpin", mine) == Reason.UNKNOWN_PIN, "of 0; the others end"
    assert caller.call("Pin", pins[2]).pinned[0].bits == b"\x03"


def test_a_release_cancels_promotions_of_its_group(caller: Caller) -> None:
    """A good message: nothing else calls a lookup's promotions off."""
    seen: list[tuple[int, list[int]]] = []
    promoter = SimpleNamespace(cancel=lambda group, ids: seen.append((group, list(ids))))
    caller.engine.tiering = SimpleNamespace(promoter=promoter, wake=lambda: None)  # type: ignore[assignment]
    request = pb.ReleaseRequest(cancelled_ids=[7, 8])
    caller.dispatcher.decide("Release", request, caller.sessions[1])
    group = caller.engine.core.state.group_of(caller.sessions[1].number)
    assert seen == [(group.number, [7, 8])]
