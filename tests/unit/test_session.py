"""Attaching: the arena and its descriptors, refusals, deadlines, and malformed answers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.fake_daemon import SEGMENT_BYTES, SLOTS, running, small_contract

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8
from kvhearth.proto.v1.cache_pb2 import HeartbeatRequest
from kvhearth.session.arena import ArenaMapping
from kvhearth.session.link import Session, attach, open_link
from kvhearth.transports.base import HEARTBEAT
from kvhearth.transports.frames import over_unix
from kvhearth.url import UnixUrl, parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth_lab.harness import HUNG_S


def hello(*, map_arena: bool = True) -> Hello:
    return Hello(PROTOCOL_VERSION, "e1", small_contract().to_json(), map_arena=map_arena, pid=1)


def url(directory: Path, attach_ms: int = 5000) -> UnixUrl:
    return UnixUrl(directory, attach_ms=attach_ms)


def mapping_of(session: Session) -> ArenaMapping:
    descriptors = session.take_descriptors()
    try:
        return ArenaMapping(session.welcome, descriptors, session.alive)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def scripted(directory: Path, talk: Callable[[socket.socket], None]) -> Iterator[None]:
    """An attach socket that runs ``talk`` on each connection, then closes it."""
    with socket.socket(socket.AF_UNIX) as listener:
        (directory / "attach.sock").unlink(missing_ok=True)
        listener.bind(str(directory / "attach.sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                talk(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(HUNG_S)


def refusal_of(directory: Path, attach_ms: int = 5000) -> KVHearthError:
    with pytest.raises(KVHearthError) as refusal:
        attach(url(directory, attach_ms), hello())
    return refusal.value


def test_no_descriptor_is_free(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        refusal = refusal_of(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refusal.reason is Reason.DAEMON_AWAY
    assert "Too many open files" in refusal.message


def test_attach_brings_the_arena_and_a_life_line(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        session = attach(url(tmp_path), hello())
        assert session.welcome.boot_id == daemon.boot_id
        descriptors = session.take_descriptors()
        assert [os.get_inheritable(each) for each in descriptors] == [False, False]
        mapping = ArenaMapping(session.welcome, descriptors, session.alive)
        for descriptor in descriptors:
            os.close(descriptor)
        assert mapping.segments == {1: SEGMENT_BYTES}
        daemon.segment[100] = 42
        assert mapping.view(1)[100] == 42
        mapping.view(1)[7] = 9
        assert daemon.segment[7] == 9
        assert mapping.address(1) == mapping.view(1).ctypes.data
        daemon.generations[4:8] = (5).to_bytes(4, "little")
        assert mapping.generations[1] == 5
        assert mapping.generations.shape == (SLOTS,)
        assert not mapping.generations.flags.writeable
        assert mapping.alive()
        daemon.drop_lines()
        assert not mapping.alive()
        assert not session.alive()
        mapping.close()
        mapping.close()
        session.close()
        session.close()


def _mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_memory_lives_as_long_as_its_last_array_and_no_longer(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()):
        session = attach(url(tmp_path), hello())
        mapping = mapping_of(session)
        address = mapping.address(1)
        part = mapping.view(1)[10:20].view(np.uint16)
        mapping.close()
        assert not mapping.alive()
        for use in (lambda: mapping.view(1), lambda: mapping.generations):
            with pytest.raises(KVHearthError) as refusal:
                use()
            assert refusal.value.reason is Reason.CLOSED
        gc.collect()
        part[0] = 1
        assert _mapped(address)
        del part
        gc.collect()
        assert not _mapped(address)
        session.close()


def test_who_comes_while_the_arena_is_being_unmapped_is_told_why(tmp_path: Path) -> None:
    reported: list[Reason] = []

    class Watched(dict[int, U8]):
        def clear(self) -> None:
            super().clear()
            with pytest.raises(KVHearthError) as refusal:
                mapping.view(1)
            reported.append(refusal.value.reason)

    with running(tmp_path, small_contract()):
        session = attach(url(tmp_path), hello())
        mapping = mapping_of(session)
        mapping._views = Watched(mapping._views)
        mapping.close()
        session.close()
    assert reported == [Reason.CLOSED]


def test_without_the_arena_no_descriptors_come(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()):
        session = attach(url(tmp_path), hello(map_arena=False))
        assert session.descriptors == []
        session.close()


def test_goodbye_is_said_once(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        session = attach(url(tmp_path), hello())
        session.goodbye()
        session.goodbye()
        daemon.wait_counts(byes=1, ended=1)
        assert not session.alive()


def test_the_daemon_runs_as_the_user_of_the_url(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        own = dataclasses.replace(url(daemon.directory), daemon_uid=os.geteuid())
        link = open_link(own, hello())
        link.transport.call(HEARTBEAT, HeartbeatRequest(), 5.0)
        link.close()
        other = dataclasses.replace(own, daemon_uid=os.geteuid() + 1)
        with pytest.raises(KVHearthError, match=f"user {os.geteuid()} serves") as refusal:
            attach(other, hello())
        assert refusal.value.reason is Reason.PEER_NOT_ALLOWED


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's id")
@pytest.mark.parametrize("name", ["attach.sock", "calls.sock"])
def test_another_users_socket_gets_no_token_and_no_hello(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.seteuid(65534)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        right = dataclasses.replace(url(tmp_path), daemon_uid=0)
        transport = over_unix(path, "secret", 1 << 20, right.check_daemon)
        use: Callable[[], object] = {
            "attach.sock": lambda: attach(right, hello()),
            "calls.sock": lambda: transport.call(HEARTBEAT, HeartbeatRequest(), 5.0),
        }[name]
        with pytest.raises(KVHearthError, match="user 65534 serves"):
            use()
        connection, _ = listener.accept()
        with connection:
            said = connection.recv(1 << 16)
    assert b"hello" not in said
    assert b"secret" not in said


def test_a_bad_user_id_in_the_url() -> None:
    for option in ("-1", "x", "4294967295", "", "1&calls=grpc", "1" * 5000, "\uff11"):
        with pytest.raises(KVHearthError, match="daemon_uid") as refusal:
            parse_url(f"kvhearth+unix:///run/kvhearth?daemon_uid={option}")
        assert refusal.value.reason is Reason.BAD_URL
    assert parse_url("kvhearth+unix:///run/kvhearth?daemon_uid=10").daemon_uid == 10


def test_a_silent_daemon_costs_the_deadline(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        daemon.silent_attach = True
        assert refusal_of(tmp_path, attach_ms=100).reason is Reason.DEADLINE


def test_answers_that_make_no_sense(tmp_path: Path) -> None:
    cases = {
        b"": Reason.DAEMON_AWAY,
        b"\x02\x00": Reason.DAEMON_AWAY,
        b"\x02\x00\x00\x00[]": Reason.BAD_MESSAGE,
        b"\xff\xff\xff\xff": Reason.BAD_MESSAGE,
        b'\x2e\x00\x00\x00{"kind":"welcome","segments":[5],"boot_id":"b"}': Reason.BAD_MESSAGE,
    }
    before, found = open_descriptors(), {}
    for data in cases:
        with scripted(tmp_path, lambda connection, data=data: connection.sendall(data)):
            found[data] = refusal_of(tmp_path).reason
    assert found == cases
    assert open_descriptors() == before


def test_a_wrong_number_of_descriptors_is_refused_and_all_are_closed(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        real, spare = daemon._memory, os.dup(daemon._memory[0])
        before = open_descriptors()
        for attempt, count in enumerate((0, 1, 3), 1):
            daemon._memory = [*real, spare][:count]
            assert refusal_of(tmp_path).reason is Reason.BAD_MESSAGE
            daemon.wait_counts(byes=attempt, ended=attempt)
            assert open_descriptors() == before
        daemon._memory = real
        os.close(spare)


def test_a_descriptor_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, small_contract(), generation_count=SLOTS + 5000):
        session = attach(url(tmp_path), hello())
        with pytest.raises(KVHearthError) as refusal:
            ArenaMapping(session.welcome, session.descriptors, session.alive)
        assert refusal.value.reason is Reason.BAD_MESSAGE
        session.close()


def test_what_fails_after_the_welcome_ends_with_a_goodbye(tmp_path: Path) -> None:
    with running(tmp_path, small_contract(), generation_count=SLOTS + 5000) as daemon:
        with pytest.raises(KVHearthError):
            open_link(url(tmp_path), hello())
        daemon.wait_counts(byes=1, ended=1)
        daemon._memory, real = daemon._memory[:1], daemon._memory
        assert refusal_of(tmp_path).reason is Reason.BAD_MESSAGE
        daemon.wait_counts(byes=2, ended=2)
        daemon._memory = real


@pytest.mark.parametrize("end", ["close", "leave_open"])
def test_an_ended_session_is_not_mistaken_for_who_has_its_descriptor(
    tmp_path: Path, end: str
) -> None:
    with running(tmp_path, small_contract()):
        session = attach(url(tmp_path), hello(map_arena=False))
        number = session._life_line.fileno()
        mine, other = socket.socketpair()
        assert session.alive()
        getattr(session, end)()
        os.dup2(mine.fileno(), number)
        assert not session.alive()
        os.close(number)
        mine.close()
        other.close()


def test_a_byte_after_the_welcome_is_the_end(tmp_path: Path) -> None:
    with running(tmp_path, small_contract()) as daemon:
        session = attach(url(tmp_path), hello(map_arena=False))
        assert session.alive()
        daemon.lines[0].sendall(b"x")
        assert not session.alive()
        session.close()
