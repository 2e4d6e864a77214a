"""Drives and GPUs of this machine, as its kernel tells in /sys and /proc; nothing is opened."""

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

from kvhearth_server.memory.page_kinds import MIB, HugePool, KernelMemory
from kvhearth_server.tiers.ssd.disk.probe import NAMES, Verdict, probe

_SECTOR_BYTES = 512
_NO_DRIVES = ("loop", "ram", "zram", "sr", "fd", "dm-", "md", "nbd")
"""What is in /sys/block and is no drive, or is made of drives that are listed, too."""

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_DRIVER_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\b")


@dataclass(frozen=True)
class Drive:
    """A whole drive; ``model`` is empty where it does not tell.

    Attributes:
        discards: it can be told what is free.
    """

    name: str
    model: str
    bytes: int
    discards: bool = False

    @property
    def nvme(self) -> bool:
        """Whether it is an NVMe one."""
        return self.name.startswith("nvme")


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's part of the machine.

    Args:
        driver: version of the kernel's module that is loaded; empty for none.
        models: of the GPUs that the driver has, one each.
        on_bus: how many of its GPUs the PCI bus has, driver or not.
        nodes: how many of them can be opened here (``/dev/nvidia0`` and so on).
    """

    driver: str
    models: tuple[str, ...]
    on_bus: int
    nodes: int

    @property
    def branch(self) -> int:
        """The driver's first number, such as 580; 0 for none."""
        return int(self.driver.partition(".")[0] or 0)


class Devices:
    """The devices of a machine whose /sys, /proc and /dev are below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def drives(self) -> list[Drive]:
        """The drives, by name."""
        folder = self._root / "sys/block"
        names = sorted(entry.name for entry in folder.glob("*"))
        return [self._drive(name) for name in names if not name.startswith(_NO_DRIVES)]

    def drives_under(self, device: int) -> list[Drive]:
        """The drives that hold a file system whose ``st_dev`` is ``device``; none for one in memory
        and for one that does not tell, such as a container's overlay.
        """
        number = f"{os.major(device)}:{os.minor(device)}"
        place = self._root / "sys/dev/block" / number
        return [self._drive(name) for name in self._disks(place)] if place.exists() else []

    def nvidia(self) -> Gpus:
        """Driver and GPUs of NVIDIA."""
        told = self._text("proc/driver/nvidia/version")
        found = _DRIVER_VERSION.search(told)
        driver = found[1] if found else self._text("sys/module/nvidia/version")
        infos = sorted((self._root / "proc/driver/nvidia/gpus").glob("*/information"))
        models = [re.search(r"^Model:\s*(.+?)\s*$", _read(one), re.MULTILINE) for one in infos]
        functions = (self._root / "sys/bus/pci/devices").glob("*")
        on_bus = [
            each
            for each in functions
            if _read(each / "vendor") == _NVIDIA
            and _read(each / "class").startswith(_DISPLAY_CLASS)
        ]
        nodes = [one for one in (self._root / "dev").glob("nvidia*") if one.name[6:].isdecimal()]
        named = tuple(model[1] for model in models if model)
        return Gpus(driver, named, len(on_bus), len(nodes))

    def _disks(self, place: Path) -> list[str]:
        """Names of the drives below a block device: itself, its partition's, its slaves'."""
        place = place.resolve()
        slaves = sorted((place / "slaves").glob("*"))
        if slaves:
            return sorted({name for slave in slaves for name in self._disks(slave)})
        return [place.parent.name if (place / "partition").exists() else place.name]

    def _drive(self, name: str) -> Drive:
        folder = f"sys/block/{name}"
        sectors = self._text(f"{folder}/size")
        return Drive(
            name,
            self._text(f"{folder}/device/model"),
            int(sectors) * _SECTOR_BYTES if sectors.isdecimal() else 0,
            self._text(f"{folder}/queue/discard_max_bytes") not in ("", "0"),
        )

    def _text(self, name: str) -> str:
        return _read(self._root / name)


def _read(path: Path) -> str:
    """A file without the blanks around it; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


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
