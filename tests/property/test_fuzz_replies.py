"""Arbitrary answers of a daemon to a client: the result is a value or a ``KVHearthError``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzz import Liar, changed, fuzz, pieces, values

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import ERROR_DOMAIN, KVHearthError, Reason
from kvhearth.model import EXTENT_BYTES, EXTENT_DTYPE
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.session.link import attach
from kvhearth.url import ATTACH_SOCKET, DaemonUrl, parse_url
from kvhearth.wire import messages as codec
from kvhearth.wire.frames import decode_status
from kvhearth.wire.handshake import Hello, SegmentInfo, Welcome, encode_frame
from kvhearth.wire.messages import parse_extents

PAGE_BYTES = 4096
SEGMENT_BYTES = 1 << 20
SLOTS = 256
GROUPS = (
    GroupSpec(GroupKind.FULL, 16, PAGE_BYTES, shards=2),
    GroupSpec(GroupKind.FULL, 16, PAGE_BYTES),
)
CONTRACT = Contract("m", "r", "uint8", GROUPS, tensor_parallel=2)
SEGMENTS = [SegmentInfo(0, SEGMENT_BYTES, 4096), SegmentInfo(7, PAGE_BYTES, 4096)]
WELCOME = Welcome("b", 1, "t", 1, "n", 1, SLOTS, 9, 1 << 20, 9, SEGMENTS)
ASKED = {0: [bytes(32)] * 3, 1: [bytes([1]) * 32] * 2}


def reported(decode: Callable[[], Any]) -> Any:
    """Returns the value, or None if it was rejected. Any other exception is a failure."""
    with contextlib.suppress(KVHearthError):
        return decode()
    return None


# -- the handshake ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Liar, DaemonUrl]]:
    with tempfile.TemporaryDirectory(prefix="kvh-") as folder:
        url = parse_url(f"kvhearth+unix://{folder}?attach_ms=5000")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(Path(folder) / ATTACH_SOCKET))
        listener.listen(8)
        with contextlib.closing(Liar(listener)) as liar:
            yield liar, url


REFUSED = {"kind": "refused", "reason": "draining", "message": "m", "details": {"self": "x"}}
messages = st.one_of(changed(WELCOME.to_message()), changed(REFUSED), values.map(lambda v: [v]))
bodies = messages.map(lambda message: json.dumps(message).encode()) | st.binary(max_size=60)
lengths = st.just(0) | st.just(0) | st.integers(-3, 1 << 31)


def test_any_answer_to_a_hello(place: tuple[Liar, DaemonUrl]) -> None:
    liar, url = place

    @fuzz(200)
    @given(bodies, lengths, st.lists(st.integers(0, 999), max_size=2), st.integers(0, 9))
    @example(json.dumps({**REFUSED, "details": {"message": 1, "reason": []}}).encode(), 0, [], 0)
    @example(json.dumps({**REFUSED, "reason": {}, "message": None}).encode(), 0, [], 3)
    @example(encode_frame(WELCOME.to_message())[4:], 0, [], 3)
    @example(encode_frame(WELCOME.to_message())[4:], 0, [1, 2, 3], 3)
    @example(b'{"kind":"refused","reason":"\\ud800","details":{"\\ud800":"\\ud800"}}', 0, [], 0)
    def say(body: bytes, more: int, cuts: list[int], passes: int) -> None:
        size = min(max(0, len(body) + more), 0xFFFFFFFF)
        liar.says, liar.passes = pieces(struct.pack("<I", size) + body, cuts), passes
        session = reported(lambda: attach(url, Hello(1, "e", CONTRACT.to_json())))
        if session is not None:
            assert len(session.descriptors) == len(session.welcome.segments) + 1
            session.close()

    before = len(os.listdir("/proc/self/fd"))
    say()
    # Two belong to the liar: the connection and the file that it passes on.
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_numbers_that_no_daemon_means() -> None:
    segment = {"segment": 0, "bytes": 1, "page_bytes": 1}
    for changes in (
        {"segments": [{**segment, "segment": 1 << 16}]},
        {"segments": [{**segment, "segment": -1}]},
        {"segments": [{**segment, "bytes": -1}]},
        {"segments": [segment] * 2},
        {"generation_count": -1},
        {"generation_count": 1 << 32},
        {"keys_max": 0},
        {"message_bytes_max": -1},
        {"leases_max": 1 << 31},
    ):
        with pytest.raises(KVHearthError) as caught:
            Welcome.from_message({**WELCOME.to_message(), **changes})
        assert caught.value.reason is Reason.BAD_MESSAGE, changes


# -- replies to calls ------------------------------------------------------------------------------

numbers = st.integers(0, 2) | st.just(0xFFFFFFFF)
bits = st.binary(max_size=3)


@st.composite
def extents(draw: st.DrawFn) -> bytes:
    """Draws extents, most of them inside the arena, possibly truncated."""
    found = np.zeros(draw(st.integers(0, 6)), EXTENT_DTYPE)
    for position in range(len(found)):
        good = draw(st.integers(0, 4)) > 0
        found[position]["slot"] = draw(
            st.integers(0, SLOTS - 1) if good else st.integers(0, 2**32 - 1)
        )
        found[position]["segment"] = 0 if good else draw(st.integers(0, 2**16 - 1))
        found[position]["offset"] = 4096 if good else draw(st.integers(0, 2**64 - 1))
        found[position]["length"] = PAGE_BYTES if good else draw(st.integers(0, 2**32 - 1))
    data = found.tobytes()
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 4)) == 0 else data


presences = st.builds(
    pb.GroupPresence,
    group=numbers,
    present=bits,
    ready=bits,
    leased=bits,
    tiers=bits,
    extents=extents(),
)
bitmaps = st.builds(types_pb2.GroupBitmap, group=numbers, bits=bits)
granted = st.builds(types_pb2.GroupExtents, group=numbers, count=numbers, extents=extents())


@st.composite
def welcomes(draw: st.DrawFn) -> Welcome:
    """Draws welcomes that a client accepts: normal ones, and barely valid ones."""
    found = reported(lambda: Welcome.from_message(draw(changed(WELCOME.to_message()))))
    return WELCOME if found is None else found


def inside(found: Any, welcome: Welcome) -> None:
    """Checks that usable extents lie inside a segment and have the length of a page."""
    rooms = {info.segment: info.bytes for info in welcome.segments}
    for each in found.reshape(-1) if rooms else ():
        assert int(each["offset"]) + int(each["length"]) <= rooms[int(each["segment"])]
        assert int(each["slot"]) < welcome.generation_count
        assert int(each["length"]) == PAGE_BYTES


@fuzz(300)
@given(st.lists(presences, max_size=3), welcomes())
def test_any_presence(replies: list[Any], welcome: Welcome) -> None:
    query = codec.pack_query(CONTRACT, ASKED)
    found = reported(lambda: codec.parse_presence(CONTRACT, welcome, query, replies))
    for group, result in (found or {}).items():
        count = len(ASKED[group])
        assert len(result.present) == len(result.ready) == len(result.tiers) == count
        assert len(result.extents) == result.leased.sum() * GROUPS[group].shards
        inside(result.extents, welcome)


@fuzz(200)
@given(st.lists(bitmaps, max_size=3), st.lists(granted, max_size=3), welcomes())
def test_any_bitmaps_and_reservations(
    found: list[Any], extents: list[Any], welcome: Welcome
) -> None:
    counts = {group: len(keys) for group, keys in ASKED.items()}
    flags = reported(lambda: codec.parse_bitmaps(counts, found))
    assert flags is None or {g: len(each) for g, each in flags.items()} == {0: 3, 1: 2}
    taken = reported(lambda: codec.parse_reservation(CONTRACT, welcome, {0: 2, 1: 1}, extents))
    for group, each in (taken or {}).items():
        assert each.shape == (len(each), GROUPS[group].shards)
        assert len(each) <= {0: 2, 1: 1}[group]
        inside(each, welcome)


def test_good_replies_are_taken() -> None:
    """The reply underlying the broken ones above is accepted."""
    found = np.zeros(4, EXTENT_DTYPE)
    found["length"] = PAGE_BYTES
    assert len(found.tobytes()) == 4 * EXTENT_BYTES
    replies = [
        types_pb2.GroupExtents(group=0, count=2, extents=found.tobytes()),
        types_pb2.GroupExtents(group=1, count=0),
    ]
    taken = codec.parse_reservation(CONTRACT, WELCOME, {0: 2, 1: 1}, replies)
    assert (taken[0].shape, taken[1].shape) == ((2, 2), (0, 1))


def good(welcome: Welcome, found: Any) -> bool:
    """Whether ``parse_extents`` must accept them: the same rules, one extent after the other."""
    rooms = {info.segment: info.bytes for info in welcome.segments}
    lengths = all(int(each["length"]) == PAGE_BYTES for each in found)
    return lengths and all(
        int(each["offset"]) + PAGE_BYTES <= rooms.get(int(each["segment"]), -1)
        and int(each["slot"]) < welcome.generation_count
        for each in (found if rooms else ())
    )


LAST = SEGMENT_BYTES - PAGE_BYTES
CHANGES = [("length", PAGE_BYTES), ("segment", 0), ("segment", 7), ("segment", 9), ("flags", 3)]
CHANGES += [(name, value) for name in ("slot", "generation") for value in (SLOTS - 1, SLOTS)]
CHANGES += [("offset", value) for value in (0, LAST, LAST + 1, (1 << 32) + LAST, (1 << 64) - 1)]
CHANGES += [("length", PAGE_BYTES << 8), ("length", 0), ("length", PAGE_BYTES + (1 << 24))]
changes_ = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(CHANGES)), max_size=3)


@fuzz(300)
@given(
    st.integers(0, 20),
    st.sampled_from([0, 0, 7]),
    changes_,
    st.sampled_from([SEGMENTS, SEGMENTS[:1], [], [SegmentInfo(0, PAGE_BYTES - 1, 4096)]]),
)
@example(20, 0, [], SEGMENTS)
@example(20, 7, [], SEGMENTS)
@example(20, 0, [(19, ("offset", LAST)), (0, ("slot", SLOTS - 1))], SEGMENTS)
@example(20, 0, [(7, ("offset", LAST + 1))], SEGMENTS)
@example(20, 0, [(7, ("slot", SLOTS))], SEGMENTS)
@example(20, 0, [(7, ("segment", 7))], SEGMENTS)
@example(20, 9, [], SEGMENTS)
@example(20, 9, [(3, ("slot", SLOTS))], [])
def test_extents_are_taken_if_each_of_them_is_good(
    count: int, segment: int, changes: list[Any], segments: list[SegmentInfo]
) -> None:
    """Covers every path of the check: few extents, many of one segment, many of several."""
    welcome = dataclasses.replace(WELCOME, segments=segments)
    found = np.zeros(count, EXTENT_DTYPE)
    found["length"], found["segment"] = PAGE_BYTES, segment
    for place, (name, value) in changes if count else ():
        found[place % count][name] = value
    taken = reported(lambda: parse_extents(CONTRACT, welcome, 1, found.tobytes(), count))
    assert (taken is not None) == good(welcome, found)
    assert taken is None or taken.tobytes() == found.tobytes()


def _info(word: str, name: str) -> bytes:
    info: Message = types_pb2.RpcErrorInfo(
        reason=word, domain=ERROR_DOMAIN, metadata={name: word, "self": "x", "message": "y"}
    )
    return info.SerializeToString()


@fuzz(200)
@given(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.text(max_size=20),
    st.sampled_from(["type.googleapis.com/google.rpc.ErrorInfo", "x"]),
    st.binary(max_size=30) | st.builds(_info, st.text(max_size=9), st.text(max_size=9)),
    st.integers(0, 3),
)
def test_any_status_of_a_call(code: int, message: str, url: str, data: bytes, count: int) -> None:
    """Built from parts that parse, so that it gets further than random bytes."""
    status = types_pb2.RpcStatus(code=code, message=message)
    for _ in range(count):
        status.details.add(type_url=url, value=data)
    error = decode_status(status.SerializeToString())
    assert isinstance(error, KVHearthError)
    assert error.reason in Reason
    assert str(error)
