"""Attacks on the doors of a real daemon by a peer without any right: garbage ends nothing, a socket
that was removed is made again, and no door takes another's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import IO

import pytest
from support.daemon import Daemon, stopped_daemon, until
from support.http_door import ANY_PORT, address_of, ask, scraped
from support.raw_door import PAGE_BYTES, RawSession, end_well, goes_on

from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire import frames
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.daemon import Process, clean_environment
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli import liveness
from kvhearth_server.config.model import Settings
from kvhearth_server.config.rlimit import CALLS_PER_SESSION_MAX, RESERVE, door_shares

BAD_CALL = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    b"\0\0\0\x04\0\0\0\0\0"
    b"\0\0\x2c\x01\x05\0\0\0\x01"
    b"\x83\x86\x04\x02/\xff\x01\x01a\0\x02te\x08trailers"
    b"\0\x0ccontent-type\x10application/grpc"
)
"""A call over HTTP/2 whose path is no UTF-8: of grpcio up to 1.85.3 it ends the server for good."""
OPEN_TO_ALL = ("attach.sock", "calls.sock")


def send(address: str | tuple[str, int], data: bytes) -> None:
    """Send bytes on a connection of its own, and read until its end."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as line, contextlib.suppress(ConnectionError):
        line.settimeout(HUNG_S)
        line.connect(address)
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        while line.recv(4096):
            pass


DAEMON = {"http": ANY_PORT}


@pytest.fixture(autouse=True)
def _all_doors_are_open(daemon: Daemon) -> None:
    until(lambda: ask(daemon, "/readyz").status == 200, "all doors are open")


def restarts(daemon: Daemon, door: str) -> int:
    return daemon.counters().get(f"door_restarts{{{door}}}", 0)


# -- garbage -------------------------------------------------------------------------------------


def test_other_users_reach_no_socket_that_garbage_ends(daemon: Daemon) -> None:
    for path in daemon.socket_dir.glob("*.sock"):
        others = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert bool(others) == (path.name in OPEN_TO_ALL), path
    assert (daemon.socket_dir / "grpc.sock").is_socket()
    assert stat.S_IMODE((daemon.socket_dir / "admin.token").stat().st_mode) == 0o600


def test_the_call_that_ends_grpc_ends_nothing(daemon: Daemon) -> None:
    """By every way that another user has into the daemon."""
    before = daemon.stats()
    with engine_of(daemon.url(), contract_of(PAGE_BYTES), "beside it") as engine:
        sockets = [str(daemon.socket_dir / name) for name in OPEN_TO_ALL]
        for address in (*sockets, address_of(daemon)):
            for data in (BAD_CALL, random.Random(95).randbytes(95), bytes(95), b"\xff" * 95):
                send(address, data)
            goes_on(engine)
        with RawSession(daemon) as session:
            session.call("Heartbeat", pb.HeartbeatRequest())
    found = daemon.stats()
    assert found.boot_id == before.boot_id
    assert not [name for name in found.counters if name.startswith("door_restarts")]
    assert ask(daemon, "/readyz").status == 200


# -- sockets -------------------------------------------------------------------------------------


def test_not_ready_while_a_door_is_shut(daemon: Daemon) -> None:
    """A directory where the socket belongs keeps the door shut."""
    path, before = daemon.socket_dir / "calls.sock", restarts(daemon, "calls")
    path.unlink()
    path.mkdir()
    try:
        answer = until(
            lambda: (found := ask(daemon, "/readyz")).status == 503 and found, "not ready"
        )
        assert b"[-]calls-door: " in answer.body
        assert b"[+]arena\n" in answer.body
        assert ask(daemon, "/livez").status == 200
        assert daemon.stats().boot_id
        problem, _, (shut,) = liveness.look(str(daemon.socket_dir))
        assert (problem, shut.partition(":")[0]) == ("", "calls")
        assert "kvhearth_doors_shut 1" in scraped(daemon)
    finally:
        path.rmdir()
    until(lambda: ask(daemon, "/readyz").status == 200, "ready again")
    assert restarts(daemon, "calls") == before + 1


def test_grpc_can_be_closed() -> None:
    with stopped_daemon(arena=False, grpc="off", http=ANY_PORT) as daemon:
        daemon.socket_dir.mkdir(mode=0o700, exist_ok=True)
        (daemon.socket_dir / "grpc.sock").touch()  # of an earlier run, which was killed
        daemon.start()
        assert not (daemon.socket_dir / "grpc.sock").exists()
        assert daemon.ready()["grpc"] == "off"
        with engine_of(daemon.url(), contract_of(PAGE_BYTES), "by frames") as engine:
            goes_on(engine)
        assert daemon.stats().boot_id
        assert ask(daemon, "/readyz").status == 200
        end_well(daemon)


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
        line.settimeout(HUNG_S)
        with contextlib.suppress(OSError):
            line.connect(address)


def test_idle_connections_leave_room_for_others(poor: Daemon) -> None:
    assert poor.stats().boot_id
    before = poor.descriptor_count() + 2
    addresses = {name: str(poor.socket_dir / name) for name in OPEN_TO_ALL}
    with contextlib.ExitStack() as lines:
        for door, address in {**addresses, "http": address_of(poor)}.items():
            idle(address, LIMIT, lines)
            for _ in range(3):
                assert ask(poor, "/livez").status == 200
                assert poor.descriptor_count() <= LIMIT - RESERVE
            with engine_of(poor.url(), contract_of(PAGE_BYTES), f"beside {door}") as engine:
                goes_on(engine)
            assert poor.stats().boot_id
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
            line.settimeout(HUNG_S)
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
