"""Memory that survives a restart where no client can cut it off, and files that one tenant cuts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import pytest
from support.daemon import Daemon, directories, running_daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.served import back, served

from kvhearth.results import CommitGroup
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.daemon import Process
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

CONTRACT = contract_of(64 << 10)
OURS, THEIRS = os.getuid(), 65533


_AS_A_UNIT = """
import os, sys
kept = [os.dup2(int(each), 100 + n) for n, each in enumerate(sys.argv[1].split())]
for number, each in enumerate(kept):
    os.dup2(each, 3 + number)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Executes a command with some descriptors from number 3 on, as systemd does."""


class Manager:
    """Does what systemd does for a unit with a descriptor store."""

    def __init__(self, path: Path) -> None:
        self.kept: dict[str, int] = {}
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def start(self, flags: list[str], environment: Mapping[str, str], log: IO[bytes]) -> Process:
        """Start a daemon as a unit's process; see ``harness.Starter``."""
        names = list(self.kept)
        variables = {
            "NOTIFY_SOCKET": str(self._path),
            "FDSTORE": "64",
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(names),
        }
        numbers = [self.kept[name] for name in names]
        before = [sys.executable, "-c", _AS_A_UNIT, " ".join(map(str, numbers))]
        command = [*before, sys.executable, "-m", "kvhearth_server.cli.app", "serve", *flags]
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment, **variables},
            pass_fds=numbers,
        )

    def forget(self) -> None:
        """Close all descriptors, as at the end of the unit."""
        for descriptor in self.kept.values():
            os.close(descriptor)
        self.kept.clear()

    def close(self) -> None:
        """End."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"END", str(self._path))
        self._thread.join()
        self._socket.close()
        self.forget()

    def _serve(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 4)
            if data == b"END":
                return
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in fields:
                (self.kept[fields["FDNAME"]],) = descriptors
            elif "FDSTOREREMOVE" in fields and (kept := self.kept.pop(fields["FDNAME"], 0)):
                os.close(kept)


@contextmanager
def keeping_daemon(**settings: object) -> Iterator[tuple[Daemon, Manager]]:
    """Yields a daemon whose memory a service manager keeps."""
    with directories() as (folder, arena_dir), closing(Manager(folder / "notify")) as manager:
        settings |= {"keep_memory": True}
        daemon = Daemon(folder, arena_dir, starter=manager.start, **settings)
        try:
            daemon.start()
            yield daemon, manager
        finally:
            daemon.kill()


@pytest.mark.parametrize("end", ["kill -9", "SIGTERM"])
def test_kept_memory_is_warm_and_no_file(end: str) -> None:
    with keeping_daemon() as (daemon, manager), engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(40)
        for _ in range(2):
            assert engine.store(keys).bound == keys
            boot_id = engine.client.boot_id
            if end == "SIGTERM":
                assert daemon.terminate() == 0
            daemon.restart()
            back(engine, boot_id)
            assert served(engine, keys) == 40
            assert len(manager.kept) == 1
            keys += new_keys(10)
            keys = keys[-40:]
            assert engine.store(keys).bound
        assert daemon.arena_dir is not None
        assert not list(daemon.arena_dir.glob("segment-*"))


def test_nobody_can_cut_kept_memory() -> None:
    """Clients get descriptors of the same sealed memory, which not even root can resize."""
    with keeping_daemon() as (daemon, _), engine_of(daemon.url(), CONTRACT) as engine:
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


def test_without_its_memory_the_arena_starts_cold_and_says_so() -> None:
    with keeping_daemon() as (daemon, manager), engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(20)
        assert engine.store(keys).bound == keys
        boot_id = engine.client.boot_id
        daemon.kill()
        manager.forget()
        daemon.start()
        back(engine, boot_id)
        assert served(engine, keys) == 0
        assert "the memory of all tenants is missing" in daemon.log_text()
        assert engine.store(keys).bound == keys


def test_without_a_descriptor_store_the_start_is_refused() -> None:
    with stopped_daemon(keep_memory=True) as daemon:
        assert daemon.launch().wait(HUNG_S) == 3
        assert "FileDescriptorStoreMax= in the unit" in daemon.log_text()


def test_other_places_of_the_memory_are_not_taken_without_being_asked() -> None:
    with running_daemon() as daemon:
        assert daemon.terminate() == 0
        daemon.settings["keep_memory"] = True
        process = daemon.launch()
        assert process.wait(HUNG_S) == 3
        assert "discard-arena" in daemon.log_text()
        daemon.settings["keep_memory"] = False
        daemon.start()


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
