"""A real daemon process for tests of bad input: start, look into its books, end it, read its log."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvhearth.proto.v1 import admin_pb2, admin_pb2_grpc
from kvhearth.url import ADMIN_TOKEN_FILE, ATTACH_SOCKET, GRPC_SOCKET
from kvhearth_server.transport.rpc.admin import ADMIN_TOKEN_KEY

_START_S = 30.0
_STOP_S = 15.0
_CALL_S = 5.0


def eventually(what: str, holds: Callable[[], Any], deadline_s: float = 10.0) -> Any:
    """The first true value of ``holds()``; fails naming ``what`` if there is none in time."""
    end = time.monotonic() + deadline_s
    while not (value := holds()):
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)
    return value


def serve_command(folder: Path, flags: Sequence[str]) -> list[str]:
    """The words that start a daemon on the sockets of ``folder``."""
    main = [sys.executable, "-m", "kvhearth_server.cli.app"]
    return [*main, "serve", "--socket-dir", str(folder), *flags]


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of the daemon."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVHEARTH_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NO_COLOR": "1"}


def start_and_fail(folder: Path, *flags: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected to end by itself: its exit status and what it wrote."""
    return subprocess.run(
        serve_command(folder, flags),
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **popen,
    )


class RawDaemon:
    """A running daemon; ``folder`` holds its sockets."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.folder = folder
        self.process = process
        self._log_path = log_path
        self._channel = grpc.insecure_channel(f"unix:{folder / GRPC_SOCKET}")
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    @property
    def attach_path(self) -> str:
        """Path of the attach socket."""
        return str(self.folder / ATTACH_SOCKET)

    @property
    def grpc_target(self) -> str:
        """gRPC's name of the decisions socket."""
        return f"unix:{self.folder / GRPC_SOCKET}"

    @property
    def admin_metadata(self) -> tuple[tuple[str, str], ...]:
        """What an admin call must carry."""
        return ((ADMIN_TOKEN_KEY, (self.folder / ADMIN_TOKEN_FILE).read_text()),)

    @property
    def log(self) -> str:
        """What the daemon wrote to stderr so far."""
        return self._log_path.read_text(errors="replace")

    def call_admin(self, method: str, request: Any) -> Any:
        """An admin call with the right token."""
        return getattr(self.admin, method)(request, metadata=self.admin_metadata, timeout=_CALL_S)

    def stats(self) -> admin_pb2.StatsResponse:
        """The daemon's figures; fails unless the books balance."""
        stats = self.call_admin("Stats", admin_pb2.StatsRequest(check_books=True))
        assert stats.books_error == ""
        return stats

    def count(self, name: str, label: str = "") -> int:
        """One counter."""
        return int(self.stats().counters.get(f"{name}{{{label}}}" if label else name, 0))

    def refusals(self, reason: str) -> int:
        """How often something was refused for ``reason``."""
        return self.count("refusals", reason)

    def descriptors(self) -> int:
        """How many descriptors the daemon has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> int:
        """SIGTERM; the exit status."""
        self._channel.close()
        self.process.terminate()
        return self.process.wait(_STOP_S)

    def kill(self) -> None:
        """Make sure that nothing of it is left."""
        self._channel.close()
        self.process.kill()
        self.process.wait(_STOP_S)


@contextlib.contextmanager
def serving(*flags: str, memory: str = "128MiB", graceful: bool = True) -> Iterator[RawDaemon]:
    """A daemon that must balance its books, have had no bug, and end well.

    Args:
        flags: further flags of ``serve``.
        memory: of all tenants together.
        graceful: what is asked for at the end.
    """
    # Not pytest's own folder: its path may be too long for a socket and is closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="kvh-", dir="/tmp"))
    folder.chmod(0o755)
    log_path = folder / "stderr"
    words = ["--memory", memory, "--slab-bytes", "8MiB", "--hugepages", "off", *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            serve_command(folder, words), env=clean_environment(), stderr=log, stdout=log
        )
    daemon = RawDaemon(folder, process, log_path)
    try:
        eventually("the daemon is ready", lambda: _ready(daemon), _START_S)
        yield daemon
        if graceful:
            end_well(daemon)
    finally:
        daemon.kill()
        shutil.rmtree(folder)


def _ready(daemon: RawDaemon) -> bool:
    assert daemon.process.poll() is None, daemon.log
    return '"event": "ready"' in daemon.log


def end_well(daemon: RawDaemon) -> None:
    """The daemon lives, its books balance, no task and no call ended in a bug, it ends with 0."""
    stats = daemon.stats()
    assert not [name for name in stats.counters if name.startswith("task_failures{")], daemon.log
    assert "refusals{internal}" not in stats.counters, daemon.log
    assert daemon.end() == 0, daemon.log
    assert "Traceback" not in daemon.log, daemon.log
    assert "never retrieved" not in daemon.log, daemon.log
