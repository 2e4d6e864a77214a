"""The harness's daemon with settings of the tests: small, quick to start, its books checked."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from kvhearth import native
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness import daemon as harness
from kvhearth_server.engine.snapshot import Stats
from support.nursery import Child, nursery

ROOT_CHARS_MAX = 60
ARENA_ROOT = Path(os.environ.get("KVHEARTH_TEST_ARENA_ROOT", "/dev/shm"))
"""Directory for arenas: a tmpfs, or a mounted hugetlbfs to try that."""
SMALL: dict[str, object] = {
    "memory": "16MiB",
    "slab_bytes": "2MiB",
    "slot_bytes_min": "16KiB",
    "hugepages": "off" if str(ARENA_ROOT) == "/dev/shm" else "prefer",
    "drain_grace_s": "0.2",
    "drain_grace_no_pidfd_s": "0.4",
    "http": "off",
    "shared_index": os.environ.get("KVHEARTH_TEST_SHARED_INDEX") != "false",
}
"""Settings of a daemon that starts quickly on any machine."""
_NATIVE = {name: text for name, text in os.environ.items() if name == native.VARIABLE}
"""Turns the native module off in daemons if the run does without it."""


def until(
    condition: Callable[[], Any],
    what: str = "the condition",
    timeout_s: float = HUNG_S,
    *,
    pause_s: float = 0.01,
) -> Any:
    """Poll until ``condition()`` is true and return its value; fail after the timeout."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(pause_s)


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.create_server(("", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Daemon(harness.Daemon):
    """A small daemon.

    Args:
        folder: for sockets and the log; a short path.
        arena_dir: on tmpfs; None for anonymous memory.
        command: start it by its command line. The default forks a process that has everything
            imported, which takes a third of the time.
        starter: starts it; by default as ``command`` says.
        settings: by field name, over ``SMALL``.
    """

    def __init__(
        self,
        folder: Path,
        arena_dir: Path | None,
        *,
        command: bool = False,
        starter: harness.Starter | None = None,
        **settings: object,
    ) -> None:
        usual = harness.tied() if command else self._fork
        super().__init__(folder, arena_dir, {**SMALL, **settings}, starter or usual)
        self.fresh_s = 0.0
        """Age up to which renderings are shared, for a daemon that is forked."""

    def _fork(self, flags: list[str], environment: Mapping[str, str], log: IO[bytes]) -> Child:
        return nursery().birth(
            "support.nursery_main:serve_daemon",
            [log.fileno()],
            arguments=flags,
            environment={**_NATIVE, **environment},
            fresh_s=self.fresh_s,
        )

    @property
    def read_back(self) -> bool:
        """Whether the current start has reported that its SSD log is recovered."""
        return any("ssd.read_back" in line for line in self.own_lines())

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of an event in the log, of gateways too."""
        lines = [json.loads(each) for each in self.own_lines() if each[:1] == "{" and "}" in each]
        return [line for line in lines if line.get("event") == name]

    def stats(self, *, check_books: bool = True) -> Stats:
        """Return the daemon's statistics; fails if the books do not balance."""
        operator = self.operator()
        if check_books:
            found = operator.books()
            assert found.balanced, found.error
        return operator.stats()

    def counters(self) -> dict[str, int]:
        """Return the daemon's counters."""
        return dict(self.stats(check_books=False).counters)

    def quarantined_bytes(self) -> int:
        """Return the quarantined bytes of all segments."""
        return sum(part.quarantined_bytes for part in self.stats().segments)

    def quiet(self) -> bool:
        """Whether no session is attached and nothing is reserved, leased, pinned or quarantined."""
        found = self.stats()
        bound = [
            part.reserved_bytes + part.quarantined_bytes + part.held_bytes
            for part in found.segments
        ]
        return not (any(bound) or found.sessions or found.groups or found.leases)

    def wait_quiet(self, timeout_s: float = HUNG_S) -> None:
        """Wait until everything that clients held is free again; fails with a list of the rest."""
        try:
            until(self.quiet, "what clients held comes back", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.stats()} {self.members()}") from None


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory whose path is short, since a socket's has 107 bytes; it is removed at the
    end.
    """
    root = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="kvh-", dir=root if len(root) <= ROOT_CHARS_MAX else "/tmp")
    try:
        yield Path(folder).resolve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def directories(*, arena: bool = True) -> Iterator[tuple[Path, Path | None]]:
    """Make a directory for sockets and one on tmpfs for an arena; both are removed at the end."""
    if arena and not os.access(ARENA_ROOT, os.W_OK):
        pytest.skip(f"needs a writable tmpfs at {ARENA_ROOT}")
    with scratch() as folder:
        arena_dir = Path(tempfile.mkdtemp(prefix="kvh-test-", dir=ARENA_ROOT)) if arena else None
        try:
            yield folder, arena_dir
        finally:
            if arena_dir is not None:
                shutil.rmtree(arena_dir, ignore_errors=True)


@contextlib.contextmanager
def stopped_daemon(
    *,
    arena: bool = True,
    command: bool = False,
    starter: harness.Starter | None = None,
    **settings: object,
) -> Iterator[Daemon]:
    """Yield a daemon that the caller starts; a process that still runs at the end is killed by its
    pid.
    """
    with directories(arena=arena) as (folder, arena_dir):
        daemon = Daemon(folder, arena_dir, command=command, starter=starter, **settings)
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
