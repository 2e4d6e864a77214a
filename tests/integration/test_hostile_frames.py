"""Bad input and attacks on the calls socket: a reason, a count, and other clients go on.

``kvhearth hostile`` has the floods whose harm is a time: ``empty_parts``, ``crowded_lookups``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, until
from support.raw_calls import RawCalls, packed
from support.raw_door import RawSession, attach_path, raw_hello, refused

from kvhearth.errors import Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1.types_pb2 import GroupKeys
from kvhearth.wire import frames
from kvhearth_server.config.rlimit import CALLS_PER_SESSION_MAX
from kvhearth_server.transport.frames import KEPT_BYTES_MAX

TIMEOUT_S = 2.0
"""Time limit of openings and frames in ``hasty``."""
MESSAGE_MAX = 1 << 20
DAEMON = {"attach_timeout_s": 60, "message_bytes_max": MESSAGE_MAX}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


@contextlib.contextmanager
def connections(daemon: Daemon, session: RawSession, count: int) -> Iterator[list[RawCalls]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(RawCalls(daemon, session.token)) for _ in range(count)]


def closed(daemon: Daemon, why: str) -> int:
    """Returns how many connections the daemon closed for this reason."""
    return daemon.counters().get(f"calls_closed{{{why}}}", 0)


# -- openings ------------------------------------------------------------------------------------

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


def test_a_bad_opening_is_refused_and_counted(daemon: Daemon) -> None:
    for data, reason in BAD_OPENINGS.values():
        with refused(daemon, reason), RawCalls(daemon) as calls:
            calls.send(data)
            raise calls.connection_refused()


def test_of_too_many_silent_ones_the_oldest_goes(daemon: Daemon, session: RawSession) -> None:
    before = daemon.descriptor_count()
    silent = [RawCalls(daemon) for _ in range(300)]
    until(lambda: daemon.descriptor_count() <= before + 70, "the oldest are let go")
    with RawCalls(daemon, session.token) as calls:
        assert calls.call("Heartbeat", pb.HeartbeatRequest())
    assert silent[0].ended()
    for each in silent:
        each.close()


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


def test_a_session_has_so_many_connections(daemon: Daemon, session: RawSession) -> None:
    opened = [RawCalls(daemon, session.token) for _ in range(CALLS_PER_SESSION_MAX)]
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


# -- frames --------------------------------------------------------------------------------------


def test_a_body_above_its_kinds_bound_ends_the_connection(
    daemon: Daemon, session: RawSession
) -> None:
    """The length in the header is enough; nothing of the body is read."""
    before = closed(daemon, "too_large")
    for kind in frames.METHODS.values():
        with refused(daemon, Reason.BAD_MESSAGE), RawCalls(daemon, session.token) as calls:
            calls.send(struct.pack("<IHH", MESSAGE_MAX + 1, kind, 1))
            raise calls.connection_refused()
    assert closed(daemon, "too_large") == before + len(frames.METHODS)


def test_what_breaks_the_stream_ends_it(daemon: Daemon, session: RawSession) -> None:
    for data, reason in (
        (packed(99, 1), Reason.PROTOCOL_VERSION),
        (packed(frames.OPEN, 0, b"0" * 64), Reason.BAD_MESSAGE),  # opened twice
    ):
        with refused(daemon, reason), RawCalls(daemon, session.token) as calls:
            calls.send(data)
            raise calls.connection_refused()
    before = closed(daemon, "too_many_parts")
    body = pb.LookupRequest(epoch=session.epoch, groups=[{}] * 20_000)
    with RawCalls(daemon, session.token) as calls:
        with refused(daemon, Reason.BAD_GROUP):
            calls.call("Lookup", body)
        assert calls.ended()
    assert closed(daemon, "too_many_parts") == before + 1


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


def test_many_calls_at_once_are_answered_in_order(daemon: Daemon, session: RawSession) -> None:
    """Even if one of them has to wait: a release that reports wrong bytes."""
    with RawCalls(daemon, session.token) as calls:
        asked = []
        for number in range(1, 301):
            name = "Release" if number % 10 == 0 else "Heartbeat"
            asked.append(packed(frames.METHODS[name], number))
        calls.send(b"".join(asked))
        assert [calls.frame()[1] for _ in range(300)] == list(range(1, 301))


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
    for ends in ([len(asked[0]), *range(len(asked[0]), len(stream))], [3, 12, 712], []):
        with RawCalls(daemon, session.token) as calls:
            for start, end in zip([0, *ends], [*ends, len(stream)], strict=True):
                calls.send(stream[start:end])
                # Its answer comes after the daemon has read this part.
                session.call("Heartbeat", pb.HeartbeatRequest())
            answers.append([calls.frame() for _ in asked])
    assert [(kind, number) for kind, number, _ in answers[0]] == [
        *((frames.DONE, 1), (frames.DONE, 2), (frames.REFUSED, 3), (frames.REFUSED, 4))
    ]
    assert answers[0] == answers[1] == answers[2]


# -- time --------------------------------------------------------------------------------------


def test_silence_and_unfinished_frames_have_a_deadline(hasty: Daemon) -> None:
    """It runs from the first byte on, however the others trickle in, and ends with its frame."""
    heartbeat = pb.HeartbeatRequest(counters={"a": 1}).SerializeToString()
    frame = packed(frames.METHODS["Heartbeat"], 1, heartbeat)
    with RawSession(hasty) as session, RawCalls(hasty, session.token) as in_time:
        in_time.send(frame[:9])
        in_time.send(frame[9:])
        assert in_time.frame()[:2] == (frames.DONE, 1)
        with RawCalls(hasty) as silent, RawCalls(hasty) as slow:
            slow.send(packed(frames.OPEN, 0, b"0" * 64)[:20])
            assert silent.connection_refused().reason is Reason.DEADLINE
            assert slow.connection_refused().reason is Reason.DEADLINE
        late = closed(hasty, "late_frame")
        with refused(hasty, Reason.DEADLINE), RawCalls(hasty, session.token) as drips:
            drips._socket.settimeout(TIMEOUT_S / 50)
            for byte in packed(frames.METHODS["Lookup"], 1, b"k" * 4096):
                drips.send(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    raise drips.connection_refused()
        assert closed(hasty, "late_frame") == late + 1
        in_time.send(frame)
        assert in_time.frame()[:2] == (frames.DONE, 1)


# -- memory ------------------------------------------------------------------------------------


def test_unfinished_frames_have_one_budget(daemon: Daemon) -> None:
    """Many sessions leave a frame unfinished on each connection; who keeps the most loses first."""
    before, bytes_before = closed(daemon, "memory"), daemon.private_bytes()
    part = packed(frames.METHODS["Lookup"], 1, b"k" * (256 << 10))[:-1]
    heartbeat = pb.HeartbeatRequest(counters={"a": 1}).SerializeToString()
    modest_frame = packed(frames.METHODS["Heartbeat"], 5, heartbeat)
    with contextlib.ExitStack() as held:
        modest = held.enter_context(RawSession(daemon))
        kept = held.enter_context(RawCalls(daemon, modest.token))
        kept.send(modest_frame[:-1])
        opened = []
        for _ in range(4):
            session = held.enter_context(RawSession(daemon))
            opened += held.enter_context(connections(daemon, session, CALLS_PER_SESSION_MAX))
        for each in opened:
            each.send(part)
        sent = len(opened) * len(part)
        until(
            lambda: closed(daemon, "memory") - before >= (sent - KEPT_BYTES_MAX) // len(part),
            "connections are closed until the rest fits",
        )
        assert daemon.private_bytes() - bytes_before < 2 * KEPT_BYTES_MAX
        kept.send(modest_frame[-1:])
        assert kept.frame()[:2] == (frames.DONE, 5)
    until(lambda: daemon.private_bytes() - bytes_before < 16 << 20, "memory comes back")


def test_who_does_not_read_is_asked_nothing_more(daemon: Daemon, session: RawSession) -> None:
    """Replies wait up to a bound, further calls in their own socket; no other peer waits."""
    keys = GroupKeys(group=0, keys=b"k" * 32 * 1000)
    lookup = pb.LookupRequest(epoch=session.epoch, groups=[keys]).SerializeToString()
    before = daemon.private_bytes()
    with RawCalls(daemon, session.token) as calls:
        taken = calls.send_for(1.0, packed(frames.METHODS["Lookup"], 1, lookup), 2000)
        assert taken < 2000, "the daemon takes calls without end"
        assert daemon.private_bytes() - before < 32 << 20


# -- processes ---------------------------------------------------------------------------------

KEEPS_A_CHILD = """
import ctypes, os, socket, struct, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
hello = sys.argv[2].encode()
line.sendall(struct.pack("<I", len(hello)) + hello)
line.recv(65536)
child = ctypes.CDLL(None).fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_session_ends_with_its_process_though_a_child_keeps_its_socket(daemon: Daemon) -> None:
    """A fork that bypasses Python's handlers leaves the attach socket open in the child."""
    before = daemon.stats().sessions
    words = [str(attach_path(daemon)), json.dumps(raw_hello())]
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS_A_CHILD, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert daemon.stats().sessions == before + 1
            process.kill()
            process.wait()
            until(lambda: daemon.stats().sessions == before, "the session ends")
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
