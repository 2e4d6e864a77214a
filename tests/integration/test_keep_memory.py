"""Memory that survives a restart where no client can cut it off, and files that one tenant cuts."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.served import back, served

from kvhearth.results import CommitGroup
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.memory import keeper as keeping

CONTRACT = contract_of(64 << 10)
OURS, THEIRS = os.getuid(), 65533


def holders(daemon: Daemon) -> list[int]:
    """Returns the pids of the holders of a daemon's memory; its idle time tells whose they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        idle = str(float(str(daemon.settings["keep_memory_s"]))).encode()
        if keeping.__file__.encode() in words and idle in words:
            found.append(int(path.name))
    return found


@contextmanager
def keeping_daemon(**settings: object) -> Iterator[Daemon]:
    """Yields a daemon whose memory a holder keeps; the holder ends with the test."""
    idle_s = f"{100 + secrets.randbelow(1 << 20) / (1 << 20):.9f}"
    with stopped_daemon(keep_memory=True, keep_memory_s=idle_s, **settings) as daemon:
        try:
            daemon.start()
            yield daemon
        finally:
            for pid in holders(daemon):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["kill -9", "SIGTERM"])
def test_kept_memory_is_warm_and_no_file(end: str) -> None:
    with keeping_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(40)
        for _ in range(2):
            assert engine.store(keys).bound == keys
            boot_id = engine.client.boot_id
            if end == "SIGTERM":
                assert daemon.terminate() == 0
            daemon.restart()
            back(engine, boot_id)
            assert served(engine, keys) == 40
            assert len(holders(daemon)) == 1
            keys += new_keys(10)
            keys = keys[-40:]
            assert engine.store(keys).bound
        assert daemon.arena_dir is not None
        assert not list(daemon.arena_dir.glob("segment-*"))
        mode = (daemon.arena_dir / keeping.SOCKET_NAME).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_nobody_can_cut_kept_memory() -> None:
    """Clients get descriptors of the same sealed memory, which not even root can resize."""
    with keeping_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(4)
        assert engine.store(keys).bound == keys
        assert daemon.process is not None
        (memory,) = {
            os.stat(path).st_ino: path
            for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir()
            if os.readlink(path).startswith("/memfd:kvhearth ")
            and os.stat(path).st_size == 16 << 20
        }.values()
        for size in (0, 32 << 20):
            with pytest.raises(PermissionError):
                os.truncate(memory, size)
        assert served(engine, keys) == 4


def test_a_holder_that_is_killed_is_replaced() -> None:
    with keeping_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys, (first,) = new_keys(20), holders(daemon)
        assert engine.store(keys).bound == keys
        os.kill(first, signal.SIGKILL)
        until(lambda: "arena.keeper_replaced" in daemon.log_text(), "the daemon notices")
        boot_id = engine.client.boot_id
        daemon.restart()
        back(engine, boot_id)
        assert served(engine, keys) == 20


def test_without_its_holder_the_arena_starts_cold_and_says_so() -> None:
    with keeping_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(20)
        assert engine.store(keys).bound == keys
        boot_id = engine.client.boot_id
        daemon.kill()
        for pid in holders(daemon):
            os.kill(pid, signal.SIGKILL)
        daemon.start()
        back(engine, boot_id)
        assert served(engine, keys) == 0
        assert "the memory of all tenants is missing" in daemon.log_text()
        assert engine.store(keys).bound == keys


def test_other_places_of_the_memory_are_not_taken_without_being_asked() -> None:
    with running_daemon() as daemon:
        assert daemon.terminate() == 0
        daemon.settings["keep_memory"] = True
        process = daemon.launch()
        assert process.wait(20) == 3
        assert "discard-arena" in daemon.log_text()
        daemon.settings["keep_memory"] = False
        daemon.start()


def test_a_holder_without_a_daemon_ends() -> None:
    with stopped_daemon(keep_memory=True, keep_memory_s="0.512345") as daemon:
        daemon.start()
        assert len(holders(daemon)) == 1
        assert daemon.terminate() == 0
        until(lambda: not holders(daemon), "the holder ends")


def test_a_holder_serves_nonsense_to_nobody(tmp_path: Path) -> None:
    keeper = keeping.open_keeper(tmp_path, 0.3)
    assert isinstance(keeper, keeping.HolderLink)
    for message in (b"", b"X", b"P", b"T" * 300, b"Pname"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(10)
            line.connect(str(tmp_path / keeping.SOCKET_NAME))
            line.send(message)
            if message:
                assert line.recv(16) == b""
    assert keeper.take() == {}
    keeper.close()


# -- systemd ---------------------------------------------------------------------------------------


def test_systemd_keeps_descriptors_by_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "FDSTORE": "64"}
        store = keeping.open_keeper(tmp_path, 1.0, environment=environment)
        assert isinstance(store, keeping.SystemdStore)
        memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        store.put("0123.0", memory)
        message, descriptors, _, _ = socket.recv_fds(manager, 1024, 4)
        assert message.decode().splitlines() == ["FDSTORE=1", "FDPOLL=0", "FDNAME=kvhearth-0123.0"]
        (copy,) = descriptors
        assert os.fstat(copy).st_ino == os.fstat(memory).st_ino
        store.forget("0123.0")
        assert manager.recv(1024).decode().splitlines() == [
            "FDSTOREREMOVE=1",
            "FDNAME=kvhearth-0123.0",
        ]
        os.close(copy)
        os.close(memory)


def test_what_systemd_kept_is_inherited(tmp_path: Path) -> None:
    child = os.fork()
    if not child:  # descriptors from number 3 on are the child's to arrange
        code = 1
        try:
            memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            other = os.memfd_create("other")
            moved = fcntl.fcntl(memory, fcntl.F_DUPFD, 100)
            other = fcntl.fcntl(other, fcntl.F_DUPFD, 100)
            os.dup2(other, 3)
            os.dup2(moved, 4)
            store = keeping.SystemdStore(
                {
                    "NOTIFY_SOCKET": str(tmp_path / "none"),
                    "LISTEN_PID": str(os.getpid()),
                    "LISTEN_FDS": "2",
                    "LISTEN_FDNAMES": "stored:kvhearth-0123.0",
                }
            )
            found = store.take()
            same = os.fstat(found["0123.0"]).st_ino == os.fstat(moved).st_ino
            sealed = keeping.is_sealed(found["0123.0"]) and not keeping.is_sealed(3)
            code = 0 if same and sealed and list(found) == ["0123.0"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- files -----------------------------------------------------------------------------------------


def tenants(ours: str) -> list[str]:
    """Two tenants of one size, of which the test's user is one."""
    other = {"a": "b", "b": "a"}[ours]
    sizes = {ours: f"{ours}={OURS}:8MiB", other: f"{other}={THEIRS}:8MiB"}
    return [sizes["a"], sizes["b"]]


def test_a_tenant_that_cuts_its_file_costs_the_others_nothing() -> None:
    with stopped_daemon(tenants=tenants("b")) as daemon:
        daemon.start()
        keys = new_keys(20)
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert engine.store(keys).bound == keys
        daemon.terminate()
        daemon.settings["tenants"] = tenants("a")
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            lost = new_keys(20)
            assert engine.store(lost).bound == lost
            assert daemon.arena_dir is not None
            os.truncate(daemon.arena_dir / "segment-0", 0)
            assert daemon.process is not None
            # A block without a checksum is read by the daemon: SIGBUS.
            cut_off(engine)
            until(lambda: daemon.dead, "the daemon ends")
        daemon.start()
        # Its sockets are open a moment before it writes its notes.
        until(lambda: "the memory of a is missing" in daemon.log_text(), "the log tells")
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert served(engine, lost) == 0
            assert engine.store(lost).bound == lost
            assert served(engine, lost) == 20
        daemon.terminate()
        daemon.settings["tenants"] = tenants("b")
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert served(engine, keys) == 20


def cut_off(engine: Engine) -> None:
    """Has the daemon read memory that was cut off; in this process the copy itself would fail."""
    client = engine.client
    brought = client.reserve({0: 1})
    assert not brought.reason, brought
    client.commit(
        {0: CommitGroup(new_keys(1), brought.groups[0], None, b"")},
        boot_id=brought.boot_id,
        epoch=client.epoch,
    )
