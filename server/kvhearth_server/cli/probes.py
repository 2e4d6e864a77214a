"""What this machine's kernel can do, found out by trying: the one door of ``doctor`` to it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.cli.devices import Devices
from kvhearth_server.memory.pages import MIB, HugePool, KernelMemory

_SO_PEERPIDFD = 77
_MADV_POPULATE_WRITE = 23
_IO_URING_SETUP = 425
_IO_URING_PARAMS_BYTES = 120
_HUGE = 2 * MIB
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?[^>]*>=\s*([0-9.]+)")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Installed:
    """A package that we need: the version that is there (empty: none) and the least one."""

    name: str
    version: str
    least: str

    @property
    def enough(self) -> bool:
        """Whether it is there and new enough."""
        return bool(self.version) and _numbers(self.version) >= _numbers(self.least)


class Machine:
    """This machine. ``root`` is ``/`` but for tests; what is tried out is tried for real."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self.memory = KernelMemory(root)
        self.devices = Devices(root)

    def node_pools(self) -> dict[str, HugePool]:
        """The pool of 2 MiB pages of each NUMA node."""
        found = {}
        for node in sorted((self._root / "sys/devices/system/node").glob("node[0-9]*")):
            folder = node / f"hugepages/hugepages-{_HUGE // 1024}kB"
            with contextlib.suppress(OSError, ValueError):
                total, free = (
                    int((folder / name).read_text()) for name in ("nr_hugepages", "free_hugepages")
                )
                found[node.name] = HugePool(_HUGE, total, free)
        return found

    def limit(self, which: int) -> int:
        """The soft limit of a resource; -1 for none."""
        return resource.getrlimit(which)[0]

    def kernel_release(self) -> str:
        """Such as ``6.5.0``."""
        return platform.release()

    def direct_io(self, folder: Path) -> str:
        """Write a page past the page cache in ``folder``; what went wrong, or empty."""
        try:
            with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, 4096) as page:
                descriptor = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
                try:
                    os.write(descriptor, page)
                finally:
                    os.close(descriptor)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def device_of(self, folder: Path) -> int:
        """``st_dev`` of the file system that holds ``folder``; 0 if there is no such folder."""
        try:
            return folder.stat().st_dev
        except OSError:
            return 0

    def io_uring(self) -> str:
        """Make a ring; what went wrong, or empty."""
        parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
        descriptor = _libc.syscall(_IO_URING_SETUP, 1, parameters)
        if descriptor < 0:
            return os.strerror(ctypes.get_errno())
        os.close(descriptor)
        return ""

    def peer_pidfd(self) -> bool:
        """Whether the kernel tells the end of the process at the other end of a socket."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                raw = ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            except OSError:
                return False
        os.close(int.from_bytes(raw, "little"))
        return True

    def populate(self) -> bool:
        """Whether pages can be had with an answer instead of a signal (MADV_POPULATE_WRITE)."""
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            try:
                page.madvise(_MADV_POPULATE_WRITE)
            except OSError:
                return False
        return True

    def packages(self) -> list[Installed]:
        """What this distribution needs for the daemon."""
        found = []
        for requirement in importlib.metadata.requires("kvhearth") or ():
            wanted, _, marker = requirement.partition(";")
            match = _REQUIREMENT.match(wanted.strip())
            if match is None or (marker and "server" not in marker):
                continue
            found.append(Installed(match[1], _version(match[1]), match[2]))
        return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
