"""Places for memory files in tests, and child processes that are killed for real."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.config.load import Settings
from kvhearth_server.memory.mapping import Filesystem, FilesystemKind, KernelMemory, filesystem_kind
from kvhearth_server.memory.plan import room_of
from kvhearth_server.preflight import arena_plan

MIB = 1 << 20
HUGE = 2 * MIB
MS_RDONLY, MNT_DETACH = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


def on_hugetlbfs(settings: Settings) -> int:
    """Return the pages that the one sizing function counts."""
    place = Filesystem(FilesystemKind.HUGETLBFS, HUGE, 0, 0)
    return room_of(arena_plan(settings).geometry, place).bytes // HUGE


def free_hugepages() -> int:
    """Return the number of free huge pages of 2 MiB."""
    return KernelMemory().pool(2 * MIB).free


def need_hugepages(count: int) -> None:
    """Skip the test unless ``count`` huge pages of 2 MiB are free."""
    if free_hugepages() < count:
        pytest.skip(f"needs {count} free huge pages of 2 MiB (sysctl -w vm.nr_hugepages)")


@contextlib.contextmanager
def tmpfs_directory() -> Iterator[Path]:
    """A new directory on ``/dev/shm``, removed at the end."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or filesystem_kind(shm).kind is not FilesystemKind.TMPFS:
        pytest.skip("needs a writable tmpfs at /dev/shm")
    path = Path(tempfile.mkdtemp(prefix="kvhearth-test-", dir=shm))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def mounted(kind: str, options: str, path: Path) -> Iterator[Path]:
    """Mount a file system of ``kind`` at ``path`` for the time of the test; root only."""
    if os.geteuid() != 0:
        pytest.skip(f"mounting {kind} needs root")
    path.mkdir(parents=True, exist_ok=True)
    # By default everybody may write to a tmpfs, and a daemon uses no such directory.
    words = ["mode=0700", *options.split(",")] if kind == "tmpfs" else options.split(",")
    flags = MS_RDONLY if "ro" in words else 0
    data = ",".join(word for word in words if word != "ro").encode()
    where = os.fsencode(path)
    if _libc.mount(b"none", where, kind.encode(), flags, data):
        pytest.skip(f"cannot mount {kind} here: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        _libc.umount2(where, MNT_DETACH)


class Child:
    """A Python process that runs ``script``, with a socket to it.

    The script can use ``peer`` (a connected unix stream socket) and ``arguments`` (strings).
    """

    def __init__(self, script: str, *arguments: str, fault: str = "") -> None:
        self.socket, peer = socket.socketpair()
        self.socket.settimeout(HUNG_S)
        head = (
            "import socket, sys\n"
            f"peer = socket.socket(fileno={peer.fileno()})\narguments = sys.argv[1:]\n"
        )
        with peer:
            self.process = subprocess.Popen(
                [sys.executable, "-c", head + script, *arguments],
                pass_fds=[peer.fileno()],
                env={**os.environ, "KVHEARTH_FAULT": fault},
            )

    def expect(self, word: bytes) -> None:
        """Wait for the child to say ``word``."""
        assert self.socket.recv(len(word), socket.MSG_WAITALL) == word

    def kill(self) -> None:
        """Kill with SIGKILL and reap."""
        self.process.kill()
        assert self.process.wait(HUNG_S) == -signal.SIGKILL
        self.socket.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait(HUNG_S)
