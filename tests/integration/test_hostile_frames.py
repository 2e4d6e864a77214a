"""Attacks of one client on the calls socket: other clients go on, and memory comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.daemon import Daemon, until
from support.raw_calls import RawCalls, packed
from support.raw_door import (
    RawLine,
    RawSession,
    attach_path,
    goes_on,
    new_keys,
    raw_hello,
    refused,
)

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1.types_pb2 import GroupKeys
from kvhearth.wire import frames
from kvhearth.wire.handshake import encode_frame
from kvhearth_lab.harness.engine import Engine
from kvhearth_server.config.rlimit import CALLS_PER_SESSION_MAX
from kvhearth_server.transport.frames import KEPT_BYTES_MAX

TIMEOUT_S = 3.0


COUNTED = pb.HeartbeatRequest(counters={"a": 1}).SerializeToString()


DAEMON = {"attach_timeout_s": TIMEOUT_S}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


@contextlib.contextmanager
def connections(daemon: Daemon, session: RawSession, count: int) -> Iterator[list[RawCalls]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(RawCalls(daemon, session.token)) for _ in range(count)]


def closed(daemon: Daemon, why: str) -> int:
    """Returns how many connections the daemon closed for this reason."""
    return daemon.counters().get(f"calls_closed{{{why}}}", 0)


@contextlib.contextmanager
def in_threads(works: list[Callable[[], object]]) -> Iterator[threading.Event]:
    """Repeats each function in a thread of its own until the block ends or it fails."""
    stop = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, AssertionError, KVHearthError):
            while not stop.is_set():
                work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# -- bounds of each kind -----------------------------------------------------------------------


EMPTY_PARTS = b"\x0a\x00" * (2 << 20)


@pytest.mark.parametrize("name", sorted(frames.METHODS))
def test_a_body_above_its_kinds_bound_ends_the_connection(
    daemon: Daemon, session: RawSession, name: str
) -> None:
    """The length in the header is enough; nothing of the body is read."""
    before = closed(daemon, "too_large")
    with refused(daemon, Reason.BAD_MESSAGE), RawCalls(daemon, session.token) as calls:
        calls.send(struct.pack("<IHH", 4 << 20, frames.METHODS[name], 1))
        raise calls.connection_refused()
    assert closed(daemon, "too_large") == before + 1


def test_empty_parts_on_all_connections_of_a_session(
    daemon: Daemon, session: RawSession, neighbour: Engine
) -> None:
    """Parsing them and adding up their sizes took 1 s for each message of 4 MiB."""
    frame = packed(frames.METHODS["Abort"], 1, EMPTY_PARTS)
    with connections(daemon, session, CALLS_PER_SESSION_MAX) as opened:
        begun = time.monotonic()
        works = [threading.Thread(target=each.send, args=(frame,)) for each in opened]
        for work in works:
            work.start()
        goes_on(neighbour)
        for work, calls in zip(works, opened, strict=True):
            work.join()
            assert calls.ended()
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("count", [65, 20_000])
def test_more_groups_than_a_call_may_have_end_the_connection(
    daemon: Daemon, session: RawSession, count: int
) -> None:
    before = closed(daemon, "too_many_parts")
    body = pb.LookupRequest(epoch=session.epoch, groups=[{}] * count)
    with RawCalls(daemon, session.token) as calls:
        with refused(daemon, Reason.BAD_GROUP):
            calls.call("Lookup", body)
        assert calls.ended()
    assert closed(daemon, "too_many_parts") == before + 1


def test_the_largest_calls_that_are_allowed(daemon: Daemon, session: RawSession) -> None:
    """As many keys as the welcome allows, and ids that are not packed."""
    keys = GroupKeys(group=0, keys=b"k" * 32 * session.welcome["keys_max"])
    unpacked = b"".join(b"\x08" + _varint((1 << 63) - 1 - number) for number in range(4096))
    with RawCalls(daemon, session.token) as calls:
        for name in ("Lookup", "Prefetch", "Touch"):
            request = getattr(pb, f"{name}Request")(epoch=session.epoch, groups=[keys])
            assert calls.call(name, request)
        with refused(daemon, Reason.UNKNOWN_LEASE):
            calls.call("Release", pb.ReleaseRequest.FromString(unpacked))
        calls.send(packed(frames.METHODS["Release"], 7, unpacked))
        assert calls.frame()[1] == 7


def _varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])


# -- time --------------------------------------------------------------------------------------


def slow_lookup(session: RawSession) -> bytes:
    """Returns a lookup of as many keys as one may name, all of them misses."""
    keys = GroupKeys(group=0, keys=b"".join(new_keys(session.welcome["keys_max"])))
    request = pb.LookupRequest(epoch=session.epoch, groups=[keys])
    return packed(frames.METHODS["Lookup"], 1, request.SerializeToString())


def median_s(calls: RawCalls, count: int) -> float:
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        assert calls.call("Heartbeat", pb.HeartbeatRequest())
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def test_a_session_has_its_turn_however_many_connections_another_one_has(
    daemon: Daemon, session: RawSession
) -> None:
    """Each of 48 connections has calls of some milliseconds waiting; all of them together must not
    have their turn before another session's one call.
    """
    frame = slow_lookup(session)
    with RawSession(daemon) as good, RawCalls(daemon, good.token) as calls:
        alone_s = median_s(calls, 20)
        with connections(daemon, session, 48) as opened:
            begun = time.perf_counter()
            for each in opened:
                each.send(frame)
            for each in opened:
                each.frame()
            all_s = time.perf_counter() - begun

            def ask(each: RawCalls) -> Callable[[], object]:
                def work() -> None:
                    each.send(frame)
                    each.frame()

                return work

            with in_threads([ask(each) for each in opened]):
                beside_s = median_s(calls, 20)
    assert beside_s < max(all_s / 4, 10 * alone_s), (alone_s, beside_s, all_s)


# -- memory ------------------------------------------------------------------------------------


def test_unfinished_frames_have_one_budget(daemon: Daemon) -> None:
    """Many sessions leave a frame unfinished on each connection."""
    before, bytes_before = closed(daemon, "memory"), daemon.private_bytes()
    part = packed(frames.METHODS["Lookup"], 1, b"k" * (256 << 10))[:-1]
    with contextlib.ExitStack() as held:
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
    until(lambda: daemon.private_bytes() - bytes_before < 16 << 20, "memory comes back")


def test_who_keeps_the_most_loses_first(daemon: Daemon, session: RawSession) -> None:
    """A modest session's unfinished frame outlives another's excess."""
    part = packed(frames.METHODS["Lookup"], 1, b"k" * (256 << 10))[:-1]
    with RawSession(daemon) as modest, RawCalls(daemon, modest.token) as kept:
        heartbeat = packed(
            frames.METHODS["Heartbeat"],
            5,
            pb.HeartbeatRequest(counters={"a": 1}).SerializeToString(),
        )
        kept.send(heartbeat[:-1])
        before = closed(daemon, "memory")
        with contextlib.ExitStack() as held:
            for _ in range(3):
                other = held.enter_context(RawSession(daemon))
                for each in held.enter_context(connections(daemon, other, CALLS_PER_SESSION_MAX)):
                    each.send(part)
            until(lambda: closed(daemon, "memory") > before, "some are closed")
            kept.send(heartbeat[-1:])
            assert kept.frame()[:2] == (frames.DONE, 5)


def test_an_unfinished_frame_has_a_deadline(daemon: Daemon, session: RawSession) -> None:
    """From its first byte on, however the others trickle in."""
    before = closed(daemon, "late_frame")
    with refused(daemon, Reason.DEADLINE), RawCalls(daemon, session.token) as calls:
        frame = packed(frames.METHODS["Lookup"], 1, b"k" * 4096)
        begun = time.monotonic()
        for place in range(1000):
            calls.send(frame[place : place + 1])
            if time.monotonic() - begun > TIMEOUT_S + 0.5:
                break
            time.sleep(0.01)
        raise calls.connection_refused()
    assert closed(daemon, "late_frame") == before + 1


def test_a_deadline_ends_with_its_frame(daemon: Daemon, session: RawSession) -> None:
    """A connection that is slow now and then, but in time, stays."""
    frame = packed(
        frames.METHODS["Heartbeat"], 1, pb.HeartbeatRequest(counters={"a": 1}).SerializeToString()
    )
    with RawCalls(daemon, session.token) as calls:
        begun = time.monotonic()
        while time.monotonic() - begun < TIMEOUT_S + 0.5:
            calls.send(frame[:9])
            time.sleep(TIMEOUT_S / 10)
            calls.send(frame[9:])
            assert calls.frame()[:2] == (frames.DONE, 1)


def test_unread_replies_have_the_same_budget(daemon: Daemon) -> None:
    bytes_before = daemon.private_bytes()
    with contextlib.ExitStack() as held:
        opened = []
        for _ in range(2):
            session = held.enter_context(RawSession(daemon))
            frame = slow_lookup(session)
            opened += held.enter_context(connections(daemon, session, CALLS_PER_SESSION_MAX))
            for each in opened:
                each._socket.setblocking(False)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            for each in opened:
                with contextlib.suppress(OSError):
                    each._socket.send(frame)
        assert daemon.private_bytes() - bytes_before < 2 * KEPT_BYTES_MAX


def test_an_attach_socket_keeps_little(daemon: Daemon) -> None:
    """After the welcome it carries only a goodbye, so an unfinished frame needs no room."""
    with refused(daemon, Reason.BAD_MESSAGE), RawLine(attach_path(daemon)) as line:
        line.send(encode_frame(raw_hello()))
        assert line.answer()["kind"] == "welcome"
        line.send(struct.pack("<I", 200_000) + b"{" * 5000)
        raise line.refusal()


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


# -- the other door ----------------------------------------------------------------------------


def test_empty_parts_over_grpc_are_counted_before_they_are_parsed(
    daemon: Daemon, session: RawSession
) -> None:
    path = "/kvhearth.proto.v1.CacheService/Abort"
    with refused(daemon, Reason.BAD_GROUP) as caught:
        session.send_bytes(path, EMPTY_PARTS[: 3 << 20])
    assert "groups in one call" in caught.value.message
    assert session.call("Heartbeat", pb.HeartbeatRequest()).boot_id == session.boot_id


def test_calls_over_grpc_take_their_sessions_time(
    daemon: Daemon, session: RawSession, neighbour: Engine
) -> None:
    """Twelve threads that look up as many keys as they may leave others their turns."""
    keys = GroupKeys(group=0, keys=b"".join(new_keys(session.welcome["keys_max"])))
    request = pb.LookupRequest(epoch=session.epoch, groups=[keys])
    answered = []

    def ask() -> None:
        answered.append(session.call("Lookup", request).boot_id)

    with in_threads([ask] * 12), RawCalls(daemon, session.token) as calls:
        until(lambda: len(answered) > 24, "calls are answered")
        goes_on(neighbour)
        assert calls.call("Heartbeat", pb.HeartbeatRequest())
    assert set(answered) == {session.boot_id}
