"""Attacks on the doors of a real daemon by a peer without any right: a door that breaks is opened
again, takes no other door's descriptors, and writes nothing into the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import grpc
import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import ANY_PORT, address_of, ask, scraped
from support.raw_door import CALL_S, PAGE_BYTES, RawSession, end_well, goes_on, refusals

from kvhearth.errors import Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire import frames
from kvhearth_lab.harness.daemon import Process, clean_environment
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli import liveness
from kvhearth_server.config.model import Settings
from kvhearth_server.config.rlimit import CALLS_PER_SESSION_MAX, RESERVE, door_shares

REPRODUCTION = Path(__file__).resolve().parents[2] / "docs/repro_grpc_aio_bad_path.py"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS, END_STREAM = 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame."""
    size = len(payload).to_bytes(3, "big")
    return size + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: bytes, value: bytes) -> bytes:
    """One header as an HPACK literal with a new name."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_of(path: bytes, *more: bytes, stream: int = 1, flags: int = END_HEADERS) -> bytes:
    """The headers of a call."""
    words = [b"\x83\x86\x04", bytes([len(path)]), path, b"\x01\x01a", field(b"te", b"trailers")]
    words += [field(b"content-type", b"application/grpc"), *more]
    return frame(HEADERS, flags, stream, b"".join(words))


OPENING = PREFACE + frame(SETTINGS, 0, 0, b"")
BAD_PATH = OPENING + call_of(b"/\xff", flags=END_HEADERS | END_STREAM)


def send(path: Path, data: bytes) -> None:
    """Send bytes on a connection of its own, and read until its end."""
    with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(ConnectionError):
        line.settimeout(20)
        line.connect(str(path))
        line.sendall(data)
        while line.recv(4096):
            pass


def heard(session: RawSession) -> bool:
    """Whether a call over gRPC is answered."""
    try:
        session.call("Heartbeat", pb.HeartbeatRequest())
    except AssertionError:  # a status without a reason: gRPC's own
        return False
    return True


DAEMON = {"http": ANY_PORT}


@pytest.fixture(autouse=True)
def _all_doors_are_open(daemon: Daemon) -> None:
    until(lambda: ask(daemon, "/readyz").status == 200, "all doors are open")


def restarts(daemon: Daemon, door: str) -> int:
    return daemon.counters().get(f"door_restarts{{{door}}}", 0)


# -- one call that ends gRPC's loop --------------------------------------------------------------


def test_the_reproduction_for_upstream_tells_what_is_so() -> None:
    """It exits with 1 as long as grpcio has the bug; with 0, the restart below is not needed."""
    done = subprocess.run(
        [sys.executable, str(REPRODUCTION)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "a good call is answered: True" in done.stdout
    assert done.returncode == (0 if done.stdout.endswith("True\n") else 1), done.stderr


def test_a_path_that_is_no_text_shuts_the_door_for_a_moment_only(daemon: Daemon) -> None:
    before = restarts(daemon, "grpc")
    with (
        engine_of(daemon.url(), contract_of(PAGE_BYTES), "by frames") as engine,
        RawSession(daemon) as session,
    ):
        boot_id = daemon.stats().boot_id
        for number in range(3):
            send(daemon.socket_dir / "grpc.sock", BAD_PATH)
            goes_on(engine)
            until(lambda: heard(session), "the session's calls go on")
            until(lambda n=number: restarts(daemon, "grpc") == before + 1 + n, "counted")
        until(lambda: ask(daemon, "/readyz").status == 200, "ready")
        assert daemon.stats().boot_id == boot_id
        assert b"kvhearth_doors_shut 0" in ask(daemon, "/metrics").body
    assert (daemon.socket_dir / "grpc.sock").stat().st_mode & 0o777 == 0o666
    shut = [json.loads(line) for line in daemon.own_lines() if "grpc.door_shut" in line]
    assert {(line["door"], line["reason"]) for line in shut} == {
        ("grpc", "gRPC's loop ended: UnicodeDecodeError")
    }


def test_not_ready_while_a_door_is_shut(daemon: Daemon) -> None:
    """A directory where the socket belongs keeps the door shut."""
    path, before = daemon.socket_dir / "grpc.sock", restarts(daemon, "grpc")
    path.unlink()
    path.mkdir()
    try:
        answer = until(
            lambda: (found := ask(daemon, "/readyz")).status == 503 and found, "not ready"
        )
        assert b"[-]grpc-door: " in answer.body
        assert b"[+]arena\n" in answer.body
        assert ask(daemon, "/livez").status == 200
        assert daemon.stats().boot_id
        problem, _, (shut,) = liveness.look(str(daemon.socket_dir))
        assert (problem, shut.partition(":")[0]) == ("", "grpc")
        assert "kvhearth_doors_shut 1" in scraped(daemon)
    finally:
        path.rmdir()
    until(lambda: ask(daemon, "/readyz").status == 200, "ready again")
    assert restarts(daemon, "grpc") == before + 1


# -- the operators' socket -----------------------------------------------------------------------


def test_operators_have_a_socket_of_their_own(daemon: Daemon) -> None:
    path = daemon.socket_dir / "admin.sock"
    found = path.stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert found.st_mode & 0o777 == 0o600
    before = restarts(daemon, "admin")
    send(daemon.socket_dir / "grpc.sock", BAD_PATH)
    assert daemon.stats().boot_id
    send(path, BAD_PATH)  # only the daemon's user and root can
    until(lambda: _asked(daemon), "operators are served again")
    assert restarts(daemon, "admin") == before + 1
    assert path.stat().st_mode & 0o777 == 0o600


def _asked(daemon: Daemon) -> bool:
    try:
        return bool(daemon.stats().boot_id)
    except grpc.RpcError:
        return False


def test_the_engines_door_serves_engines_only(daemon: Daemon) -> None:
    token = (daemon.socket_dir / "admin.token").read_text()
    with RawSession(daemon) as session:
        for path in (
            "/kvhearth.proto.v1.AdminService/Stats",
            "/grpc.health.v1.Health/Check",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            with pytest.raises(grpc.RpcError) as caught:
                session.channel.unary_unary(path)(
                    admin_pb2.StatsRequest().SerializeToString(),
                    timeout=CALL_S,
                    metadata=(("kvhearth-admin-token", token),),
                )
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_engines_door_can_be_closed() -> None:
    with running_daemon(arena=False, grpc="off", http=ANY_PORT) as daemon:
        assert not (daemon.socket_dir / "grpc.sock").exists()
        assert daemon.ready()["grpc"] == "off"
        with engine_of(daemon.url(), contract_of(PAGE_BYTES), "by frames") as engine:
            goes_on(engine)
        assert daemon.stats().boot_id
        assert ask(daemon, "/readyz").status == 200
        end_well(daemon)


# -- what a stranger may send --------------------------------------------------------------------

WINDOW_BYTES = 64 << 10
INITIAL_WINDOW = 4
HEARTBEAT = b"/kvhearth.proto.v1.CacheService/Heartbeat"


def frames_of(line: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, stream and payload of each HTTP/2 frame that arrives, to the end."""
    data = b""
    while True:
        while len(data) < 9 or len(data) < 9 + int.from_bytes(data[:3], "big"):
            more = line.recv(1 << 16)
            if not more:
                return
            data += more
        size = int.from_bytes(data[:3], "big")
        yield data[3], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]
        data = data[9 + size :]


def test_nothing_of_a_stranger_is_waited_for(daemon: Daemon) -> None:
    """Refused at its headers: gRPC would receive 4 MiB of everybody first."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(CALL_S)
        line.connect(str(daemon.socket_dir / "grpc.sock"))
        line.sendall(OPENING + call_of(HEARTBEAT))
        for kind, stream, payload in frames_of(line):
            if kind == SETTINGS and payload:
                pairs = dict(struct.iter_unpack(">HI", payload))
                assert pairs.get(INITIAL_WINDOW, 65535) <= WINDOW_BYTES
            if (kind, stream) == (HEADERS, 1):
                assert b"unknown_token" in payload or b"grpc-status" in payload
                break
    assert refusals(daemon, Reason.UNKNOWN_TOKEN) > 0


def test_a_message_that_does_not_end(daemon: Daemon) -> None:
    """Its call ends by a deadline, and others of the same tenant are served meanwhile."""
    before = refusals(daemon, Reason.DEADLINE)
    begun = struct.pack(">BI", 0, 1 << 20) + bytes(100)
    with RawSession(daemon) as session, contextlib.ExitStack() as lines:
        token = field(b"kvhearth-token", session.token.encode())
        for _ in range(3):
            line = lines.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(str(daemon.socket_dir / "grpc.sock"))
            calls = [call_of(HEARTBEAT, token, stream=n) + frame(DATA, 0, n, begun) for n in (1, 3)]
            line.sendall(OPENING + b"".join(calls))
        session.call("Heartbeat", pb.HeartbeatRequest())
        until(lambda: refusals(daemon, Reason.DEADLINE) == before + 6, "each has its deadline")
        session.call("Heartbeat", pb.HeartbeatRequest())


# -- descriptors ---------------------------------------------------------------------------------

LIMIT = 420


def limited(flags: list[str], environment: Mapping[str, str], log: IO[bytes]) -> Process:
    """Start a daemon that may have ``LIMIT`` descriptors."""
    script = f'ulimit -n {LIMIT}; exec "$@"'
    main = [sys.executable, "-m", "kvhearth_lab.harness.daemon_main", str(os.getpid()), "", "serve"]
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *main, *flags],
        stdout=log,
        stderr=log,
        env={**clean_environment(), **environment},
    )


@pytest.fixture(scope="module")
def poor() -> Iterator[Daemon]:
    """A daemon with few descriptors."""
    with stopped_daemon(arena=False, starter=limited, http=ANY_PORT, sessions_max=4) as daemon:
        daemon.start()
        yield daemon
        end_well(daemon)


def idle(address: str | tuple[str, int], count: int, lines: contextlib.ExitStack) -> None:
    """Open connections that send nothing, as many as are taken."""
    for _ in range(count):
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        line = lines.enter_context(socket.socket(family))
        line.settimeout(CALL_S)
        with contextlib.suppress(OSError):
            line.connect(address)


@pytest.mark.parametrize("door", ["grpc.sock", "calls.sock", "attach.sock", "http", "all"])
def test_idle_connections_leave_room_for_others(poor: Daemon, door: str) -> None:
    assert poor.stats().boot_id  # by then both gRPC doors have their probe's connection
    before = poor.descriptor_count() + 2
    sockets = ("grpc.sock", "calls.sock", "attach.sock")
    addresses = {name: str(poor.socket_dir / name) for name in sockets}
    places = {**addresses, "http": address_of(poor)}
    with contextlib.ExitStack() as lines:
        for name, address in places.items():
            if door in (name, "all"):
                idle(address, LIMIT, lines)
        for _ in range(3):
            assert ask(poor, "/livez").status == 200
            assert poor.descriptor_count() <= LIMIT - RESERVE
        with engine_of(poor.url(), contract_of(PAGE_BYTES), f"beside {door}") as engine:
            goes_on(engine)
        assert poor.stats().boot_id
        if door not in ("grpc.sock", "all"):
            name = door.removesuffix(".sock")
            assert poor.counters()[f"connections_refused{{{name}}}"] > 0
    until(lambda: poor.descriptor_count() <= before, "descriptors come back")
    assert "Too many open files" not in poor.log_text()


def test_a_session_has_its_fair_part_of_calls(poor: Daemon) -> None:
    """One session that opens all it can leaves places for the next one."""

    def opened(session: RawSession, lines: contextlib.ExitStack) -> int:
        count = 0
        for _ in range(CALLS_PER_SESSION_MAX + 1):
            line = lines.enter_context(socket.socket(socket.AF_UNIX))
            line.settimeout(CALL_S)
            line.connect(str(poor.socket_dir / "calls.sock"))
            token = session.token.encode()
            line.sendall(frames.HEADER.pack(len(token), frames.OPEN, 0) + token)
            _, kind, _ = frames.HEADER.unpack(line.recv(frames.HEADER.size))
            count += kind == frames.DONE
        return count

    shares = door_shares(Settings(sessions_max=4), LIMIT)
    with contextlib.ExitStack() as lines:
        sessions = [lines.enter_context(RawSession(poor, engine_id=f"e{n}")) for n in range(4)]
        counts = [opened(session, lines) for session in sessions]
        assert shares.calls_fair <= min(counts)
        assert sum(counts) <= shares.calls
        assert max(counts) < CALLS_PER_SESSION_MAX + 1


# -- the log -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n\r\n",
        b"Host: elsewhere\r\n\r\n",
        b"Host: localhost\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000),
        b"Host: localhost\r\nContent-Length: x\r\n\r\n",
    ],
    ids=["no chunk", "another host", "too long", "no length"],
)
def test_a_refused_head_is_no_failure(daemon: Daemon, rest: bytes) -> None:
    """The answer to HEAD has no body: sending one raised, and each wrote a traceback."""
    before = refusals(daemon, Reason.BAD_MESSAGE)
    with socket.create_connection(address_of(daemon)) as line:
        line.settimeout(CALL_S)
        line.sendall(b"HEAD /livez HTTP/1.1\r\n" + rest)
        assert line.recv(1000).startswith(b"HTTP/1.1 4")
    assert refusals(daemon, Reason.BAD_MESSAGE) == before + 1
    assert "Traceback" not in daemon.log_text()
