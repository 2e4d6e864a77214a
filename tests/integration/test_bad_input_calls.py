"""Bad input on the calls socket of a real daemon: a reason, a count, and no other effect."""

from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.daemon import Daemon, until
from support.raw_calls import RawCalls, packed
from support.raw_door import RawSession, goes_on, refused

from kvhearth.errors import Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1.types_pb2 import GroupKeys
from kvhearth.wire import frames
from kvhearth_lab.harness.engine import Engine

TIMEOUT_S = 3.0
MESSAGE_MAX = 1 << 20


DAEMON = {"attach_timeout_s": TIMEOUT_S, "message_bytes_max": MESSAGE_MAX}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


BAD_OPENINGS = {
    "wrong token": (packed(frames.OPEN, 0, b"0" * 64), Reason.UNKNOWN_TOKEN),
    "no token": (packed(frames.OPEN, 0), Reason.UNKNOWN_TOKEN),
    "not ASCII": (packed(frames.OPEN, 0, b"\xff" * 64), Reason.UNKNOWN_TOKEN),
    "long token": (packed(frames.OPEN, 0, b"0" * 257), Reason.BAD_MESSAGE),
    "length of 4 GiB": (struct.pack("<IHH", 0xFFFFFFFF, 0, 0), Reason.BAD_MESSAGE),
    "call before the token": (packed(frames.METHODS["Heartbeat"], 1), Reason.BAD_MESSAGE),
    "http": (b"GET / HTTP/1.1\r\n\r\n", Reason.BAD_MESSAGE),
    "attach frame": (struct.pack("<I", 16) + b'{"kind":"hello"}', Reason.BAD_MESSAGE),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_bad_opening_is_refused_and_counted(daemon: Daemon, name: str) -> None:
    data, reason = BAD_OPENINGS[name]
    with refused(daemon, reason), RawCalls(daemon) as calls:
        calls.send(data)
        raise calls.connection_refused()


def test_silence_is_refused_in_time(daemon: Daemon) -> None:
    with RawCalls(daemon) as calls, RawCalls(daemon) as slow:
        slow.send(packed(frames.OPEN, 0, b"0" * 64)[:20])
        assert calls.connection_refused().reason is Reason.DEADLINE
        assert slow.connection_refused().reason is Reason.DEADLINE


def test_of_too_many_silent_ones_the_oldest_goes(daemon: Daemon, session: RawSession) -> None:
    silent = [RawCalls(daemon) for _ in range(80)]
    with RawCalls(daemon, session.token) as calls:
        assert calls.call("Heartbeat", pb.HeartbeatRequest())
    for each in silent:
        assert each.ended()
        each.close()


BAD_CALLS = {
    "no such call": (packed(99, 1), Reason.PROTOCOL_VERSION),
    "opened twice": (packed(frames.OPEN, 0, b"0" * 64), Reason.BAD_MESSAGE),
    "too long": (struct.pack("<IHH", MESSAGE_MAX + 1, 2, 1), Reason.BAD_MESSAGE),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_breaks_the_stream_ends_it(daemon: Daemon, session: RawSession, name: str) -> None:
    data, reason = BAD_CALLS[name]
    with refused(daemon, reason), RawCalls(daemon, session.token) as calls:
        calls.send(data)
        raise calls.connection_refused()


def test_what_cannot_be_parsed_is_refused_and_the_stream_goes_on(
    daemon: Daemon, session: RawSession
) -> None:
    with RawCalls(daemon, session.token) as calls:
        calls.send(packed(frames.METHODS["Lookup"], 7, b"\xff\xff\xff"))
        kind, number, _ = calls.frame()
        assert (kind, number) == (frames.REFUSED, 7)
        with refused(daemon, Reason.BAD_KEYS):
            groups = [GroupKeys(group=0, keys=b"x")]
            calls.call("Lookup", pb.LookupRequest(epoch=session.epoch, groups=groups))
        reply = pb.HeartbeatResponse.FromString(calls.call("Heartbeat", pb.HeartbeatRequest()))
        assert reply.boot_id == session.boot_id


def test_a_sessions_connections_end_with_it(daemon: Daemon) -> None:
    session = RawSession(daemon)
    opened = [RawCalls(daemon, session.token) for _ in range(10)]
    assert opened[0].call("Heartbeat", pb.HeartbeatRequest())
    session.close()
    for calls in opened:
        assert calls.ended()
        calls.close()
    with RawCalls(daemon) as late:
        late.send(packed(frames.OPEN, 0, session.token.encode()))
        assert late.connection_refused().reason is Reason.UNKNOWN_TOKEN


def test_a_burst_of_silent_ones_takes_no_more_places(daemon: Daemon) -> None:
    before = daemon.descriptor_count()
    silent = [RawCalls(daemon) for _ in range(300)]
    try:
        until(lambda: daemon.descriptor_count() <= before + 70, "the oldest are let go", TIMEOUT_S)
    finally:
        for each in silent:
            each.close()


def test_a_session_has_so_many_connections(daemon: Daemon, session: RawSession) -> None:
    opened = [RawCalls(daemon, session.token) for _ in range(64)]
    with RawCalls(daemon) as one_more:
        one_more.send(packed(frames.OPEN, 0, session.token.encode()))
        assert one_more.connection_refused().reason is Reason.TOO_MANY_SESSIONS
    opened.pop().close()

    def again() -> bool:
        with RawCalls(daemon) as calls:
            calls.send(packed(frames.OPEN, 0, session.token.encode()))
            return calls.frame()[0] == frames.DONE

    until(again, "a place is free")
    for each in opened:
        each.close()


def test_many_calls_at_once_are_answered_in_order(daemon: Daemon, session: RawSession) -> None:
    """Even if one of them has to wait: a release that reports wrong bytes."""
    with RawCalls(daemon, session.token) as calls:
        asked = []
        for number in range(1, 301):
            name = "Release" if number % 10 == 0 else "Heartbeat"
            asked.append(packed(frames.METHODS[name], number))
        calls.send(b"".join(asked))
        assert [calls.frame()[1] for _ in range(300)] == list(range(1, 301))


def test_frames_may_come_byte_by_byte(daemon: Daemon, session: RawSession) -> None:
    with RawCalls(daemon) as calls:
        data = packed(frames.OPEN, 0, session.token.encode())
        for byte in data + packed(frames.METHODS["Heartbeat"], 5):
            calls.send(bytes([byte]))
        assert [calls.frame()[:2] for _ in range(2)] == [(frames.DONE, 0), (frames.DONE, 5)]


def test_a_frame_alone_is_answered_as_one_among_others(daemon: Daemon, session: RawSession) -> None:
    """Includes rejected calls, and frames that arrive in pieces or with the next one's head."""
    keys = GroupKeys(group=0, keys=b"k" * 32 * 40)
    lookup = pb.LookupRequest(epoch=session.epoch, groups=[keys]).SerializeToString()
    calls_made = [("Lookup", lookup), ("Heartbeat", b""), ("Lookup", b"\xff"), ("Pin", b"")]
    asked = [
        packed(frames.METHODS[name], number, body)
        for number, (name, body) in enumerate(calls_made, 1)
    ]
    stream = b"".join(asked)
    answers = []
    for sizes in ([len(each) for each in asked], [3, 9, 700, 2000], [len(stream)]):
        with RawCalls(daemon, session.token) as calls:
            sent = 0
            for size in sizes:
                calls.send(stream[sent : sent + size])
                sent += size
                time.sleep(0.02)  # so that the daemon reads this part separately
            got = [calls.frame() for _ in asked]
        answers.append(got)
    assert [(kind, number) for kind, number, _ in answers[0]] == [
        *((frames.DONE, 1), (frames.DONE, 2), (frames.REFUSED, 3), (frames.REFUSED, 4))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_who_does_not_read_is_asked_nothing_more(daemon: Daemon, session: RawSession) -> None:
    """Replies wait up to a bound, further calls in their own socket; no other peer waits."""
    keys = GroupKeys(group=0, keys=b"k" * 32 * 1000)
    lookup = pb.LookupRequest(epoch=session.epoch, groups=[keys]).SerializeToString()
    before = daemon.private_bytes()
    with RawCalls(daemon, session.token) as calls:
        taken = calls.send_for(1.0, packed(frames.METHODS["Lookup"], 1, lookup), 2000)
        assert taken < 2000, "the daemon takes calls without end"
        assert daemon.private_bytes() - before < 32 << 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_garbage_never_hurts(daemon: Daemon, neighbour: Engine, parts: list[bytes]) -> None:
    with RawSession(daemon) as session, RawCalls(daemon, session.token) as calls:
        for number, part in enumerate(parts, 1):
            calls.send(packed(number % 12, number, part))
        calls.half_close()
        assert calls.ended()
    started = time.monotonic()
    goes_on(neighbour)
    assert time.monotonic() - started < 30
