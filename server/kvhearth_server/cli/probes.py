"""What this machine's kernel can do, found out by trying: the one door of ``doctor`` to it."""

from __future__ import annotations

import contextlib
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
from kvhearth_server.tiers.ssd.disk.choose import NAMES, Verdict, probe

_SO_PEERPIDFD = 77
_MADV_POPULATE_WRITE = 23
_HUGE = 2 * MIB
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?[^>]*>=\s*([0-9.]+)")


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


@dataclass(frozen=True)
class Mount:
    """Where a file system is mounted, its kind, and the options of mount and file system."""

    point: Path
    kind: str
    options: frozenset[str]

    @property
    def depth(self) -> int:
        """How far below the root it is."""
        return len(self.point.parts)


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

    def disk_interfaces(self, depth: int) -> list[Verdict]:
        """Each kernel interface for disk I/O, tried with a read; best first."""
        return [probe(name, depth) for name in NAMES]

    def disk_interface(self, name: str, depth: int) -> Verdict:
        """One of the ``disk_interfaces``."""
        return next(each for each in self.disk_interfaces(depth) if each.name == name)

    def mount_of(self, folder: Path) -> Mount | None:
        """The file system that holds ``folder``; None where the kernel does not tell."""
        place, found = folder.resolve(), None
        try:
            lines = (self._root / "proc/self/mountinfo").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return None
        for line in lines:
            fields, _, rest = line.partition(" - ")
            words, kind = fields.split(), rest.split()
            if len(words) < 6 or len(kind) < 3:
                continue
            point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4]))
            # Of several on top of each other, the last is seen.
            if place.is_relative_to(point) and (found is None or len(point.parts) >= found.depth):
                options = frozenset((*words[5].split(","), *kind[2].split(",")))
                found = Mount(point, kind[0], options)
        return found

    def space(self, existing: Path, folder: Path) -> tuple[int, int]:
        """Bytes that are free for this user on the file system of ``existing``, and bytes that the
        files of ``folder`` have already.
        """
        found = os.statvfs(existing)
        taken = 0
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            taken = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        return found.f_bavail * found.f_frsize, taken

    def trims_weekly(self) -> bool:
        """Whether systemd tells drives what is free, by its timer."""
        wants = "systemd/system/timers.target.wants/fstrim.timer"
        places = (self._root / "etc" / wants, self._root / "usr/lib" / wants)
        return any(place.is_symlink() or place.exists() for place in places)

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
