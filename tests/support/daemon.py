"""A real daemon process for tests: start, kill -9, restart, and access to its log and
statistics.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import grpc
import pytest

from kvhearth.failpoints import ENVIRONMENT_NAME
from kvhearth.proto.v1 import admin_pb2, admin_pb2_grpc
from kvhearth_server.config.load import flag_of
from support.nursery import Child, nursery

READY_S = 60.0
"""A daemon starts in under a second; on a shared machine it may take longer."""
ARENA_ROOT = Path(os.environ.get("KVHEARTH_TEST_ARENA_ROOT", "/dev/shm"))
"""Directory for arenas: a tmpfs, or a mounted hugetlbfs to try that."""
SMALL = {
    "memory": "16MiB",
    "slab_bytes": "2MiB",
    "slot_bytes_min": "16KiB",
    "hugepages": "off" if str(ARENA_ROOT) == "/dev/shm" else "prefer",
    "drain_grace_s": "0.2",
    "drain_grace_no_pidfd_s": "0.4",
    "log_format": "json",
    "http": "off",
    # Tests that corrupt bytes choose which check must find them.
    "scrub_rate": "0",
}
"""Settings of a daemon that starts quickly on any machine."""


def until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """Poll until ``condition()`` is true and return its value; fail after the timeout."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)


class Daemon:
    """One daemon's settings and directories, and its running process, if there is one.

    Args:
        folder: for sockets and the log; a short path.
        arena_dir: on tmpfs; None for anonymous memory.
        command: start it by its command line. The default forks a process that has everything
            imported, which takes a third of the time.
        settings: by field name, over ``SMALL``.
    """

    def __init__(
        self, folder: Path, arena_dir: Path | None, *, command: bool = False, **settings: object
    ) -> None:
        self.folder = folder
        self.socket_dir = folder / "s"
        self.arena_dir = arena_dir
        self.command = command
        self.settings: dict[str, object] = {**SMALL, **settings}
        self.environment: dict[str, str] = {}
        """Additional environment variables of a daemon that is started by its command line."""
        self.starts = 0
        self._log_from = 0
        self.process: subprocess.Popen[bytes] | Child | None = None

    # -- the process -------------------------------------------------------------------------------

    def launch(self, fault: str = "") -> subprocess.Popen[bytes] | Child:
        """Start a process without waiting for it; ``fault`` is ``point:count``."""
        assert self.dead, "end the running daemon first"
        self.starts += 1
        with self.log_path.open("ab") as log:
            self._log_from = log.tell()
            if self.command:
                self.process = self._spawn(log, fault)
            else:
                self.process = nursery().birth(
                    "support.nursery_main:serve_daemon",
                    [log.fileno()],
                    arguments=self.flags(),
                    fault=fault,
                )
        return self.process

    def _spawn(self, log: IO[bytes], fault: str) -> subprocess.Popen[bytes]:
        environment = {n: v for n, v in os.environ.items() if not n.startswith("KVHEARTH_")}
        environment |= self.environment
        if fault:
            environment[ENVIRONMENT_NAME] = fault
        words = [sys.executable, "-m", "kvhearth_lab.harness.daemon_main", str(os.getpid()), ""]
        words += ["serve", *self.flags()]
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    def start(self, fault: str = "") -> bool:
        """Start and wait until it answers; False if an armed fault ended it before."""
        process = self.launch(fault)
        end = time.monotonic() + READY_S
        while not self._answers(process.pid):
            if process.poll() is not None:
                ended = f"the daemon ended with {self.exit_code}\n{self.log_tail()}"
                assert (bool(fault), self.exit_code) == (True, -signal.SIGKILL), ended
                return False
            assert time.monotonic() < end, f"the daemon does not come up\n{self.log_tail()}"
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self, fault: str = "") -> bool:
        """Kill with SIGKILL, then start on the same directories."""
        self.kill()
        return self.start(fault)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """Send SIGTERM. Return the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    @property
    def dead(self) -> bool:
        """Whether no process runs."""
        return self.process is None or self.process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Exit status of the last process; None while it runs."""
        return None if self.process is None else self.process.poll()

    def flags(self) -> list[str]:
        """Return settings and directories as command line flags."""
        values = {**self.settings, "socket_dir": self.socket_dir}
        if self.arena_dir is not None:
            values["arena_dir"] = self.arena_dir
        flags = []
        for name, value in values.items():
            flag = flag_of(name)
            if isinstance(value, bool):
                flags.append(flag if value else f"--no-{flag[2:]}")
                continue
            for each in value if isinstance(value, list) else [value]:
                flags += [flag, str(each)]
        return flags

    def _answers(self, pid: int) -> bool:
        """Whether process ``pid`` accepts on the attach socket. A dead process may have left the
        socket's file.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(READY_S)
            try:
                probe.connect(str(self.socket_dir / "attach.sock"))
            except OSError:
                return False
            data = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return bool(struct.unpack("3i", data)[0] == pid)

    # -- log and statistics ------------------------------------------------------------------------

    @property
    def log_path(self) -> Path:
        """File with the output of all starts."""
        return self.folder / "log"

    def log_text(self) -> str:
        """Return the output of all starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def own_lines(self) -> list[str]:
        """Return the complete lines of the current start's output."""
        if not self.log_path.exists():
            return []
        said = self.log_path.read_bytes()[self._log_from :]
        return said[: said.rfind(b"\n") + 1].decode(errors="replace").splitlines()

    @property
    def read_back(self) -> bool:
        """Whether the current start has reported that its SSD log is recovered."""
        return any("the SSD log is read back" in line for line in self.own_lines())

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the log, for messages."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def url(self, options: str = "call_ms=10000&lookup_ms=10000&heartbeat_ms=200") -> str:
        """Return the URL for clients."""
        return f"kvhearth+unix://{self.socket_dir}?{options}"

    def admin(self, call: Callable[[Any, Any], Any]) -> Any:
        """Return ``call(stub, metadata)``, made on a channel of its own."""
        token = (self.socket_dir / "admin.token").read_text()
        with grpc.insecure_channel(
            f"unix:{self.socket_dir}/grpc.sock", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            return call(
                admin_pb2_grpc.AdminServiceStub(channel), (("kvhearth-admin-token", token),)
            )

    def stats(self, *, check_books: bool = True) -> admin_pb2.StatsResponse:
        """Return the daemon's statistics; fails if the books do not balance."""
        request = admin_pb2.StatsRequest(check_books=check_books)
        found: admin_pb2.StatsResponse = self.admin(
            lambda stub, metadata: stub.Stats(request, metadata=metadata, timeout=20)
        )
        assert found.books_error == "", found.books_error
        return found

    def counters(self) -> dict[str, int]:
        """Return the daemon's counters."""
        return dict(self.stats(check_books=False).counters)

    def quarantined_bytes(self) -> int:
        """Return the quarantined bytes of all segments."""
        return sum(part.quarantined_bytes for part in self.stats().segments)

    def members(self) -> list[str]:
        """Return ``engine/rank:state`` of each member of a group."""
        reply = self.admin(
            lambda stub, metadata: stub.ListSessions(
                admin_pb2.ListSessionsRequest(), metadata=metadata, timeout=20
            )
        )
        return sorted(f"{one.engine_id}/{one.rank}:{one.state}" for one in reply.sessions)

    def descriptor_count(self) -> int:
        """Return the number of the process's open descriptors."""
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def quiet(self) -> bool:
        """Whether no session is attached and nothing is reserved, leased, pinned or quarantined."""
        found = self.stats()
        bound = [
            part.reserved_bytes + part.quarantined_bytes + part.held_bytes
            for part in found.segments
        ]
        return not (any(bound) or found.sessions or found.groups or found.leases)

    def wait_quiet(self, timeout_s: float = 20.0) -> None:
        """Wait until everything that clients held is free again; fails with a list of the rest."""
        try:
            until(self.quiet, "what clients held comes back", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.stats()} {self.members()}") from None


@contextlib.contextmanager
def directories(*, arena: bool = True) -> Iterator[tuple[Path, Path | None]]:
    """Make a short directory for sockets and one on tmpfs for an arena; both are removed at the
    end.
    """
    if arena and not os.access(ARENA_ROOT, os.W_OK):
        pytest.skip(f"needs a writable tmpfs at {ARENA_ROOT}")
    folder = Path(tempfile.mkdtemp(prefix="kvh-"))
    arena_dir = Path(tempfile.mkdtemp(prefix="kvh-test-", dir=ARENA_ROOT)) if arena else None
    try:
        yield folder, arena_dir
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if arena_dir is not None:
            shutil.rmtree(arena_dir, ignore_errors=True)


@contextlib.contextmanager
def stopped_daemon(
    *, arena: bool = True, command: bool = False, **settings: object
) -> Iterator[Daemon]:
    """Yield a daemon that the caller starts; a process that still runs at the end is killed by its
    pid.
    """
    with directories(arena=arena) as (folder, arena_dir):
        daemon = Daemon(folder, arena_dir, command=command, **settings)
        try:
            yield daemon
        except BaseException:
            print(f"-- log of the daemon in {folder}, {daemon.starts} starts\n{daemon.log_tail()}")
            raise
        finally:
            daemon.kill()


@contextlib.contextmanager
def running_daemon(
    *, arena: bool = True, command: bool = False, **settings: object
) -> Iterator[Daemon]:
    """Yield a running daemon."""
    with stopped_daemon(arena=arena, command=command, **settings) as daemon:
        daemon.start()
        yield daemon
