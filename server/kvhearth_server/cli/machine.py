"""Facts about this machine, from /sys, /proc and the kernel: drives, GPUs, mounts, limits."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import select
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvhearth import native
from kvhearth.memory_limits import Mount, mounts
from kvhearth.shared_memory import MADV_POPULATE_WRITE, advise
from kvhearth_server.config.model import HUGEPAGE_BYTES
from kvhearth_server.memory.mapping import HugePool, KernelMemory, address_of
from kvhearth_server.tiers.remote.process import Mover
from kvhearth_server.tiers.remote.url import RemoteUrl
from kvhearth_server.tiers.ssd.disk.probe import ProbeResult, probe
from kvhearth_server.transport.attach import peer_of

_SECTOR_BYTES = 512
_NO_DRIVES = ("loop", "ram", "zram", "sr", "fd", "dm-", "md", "nbd")
"""Prefixes of entries in /sys/block that are no drive, or are made of drives listed too."""

GOOD_FILESYSTEMS = frozenset({"ext4", "xfs"})
"""Kinds that preallocate and write in place, as the SSD tier wants."""

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_REMOTE_S = 30.0
_DRIVER_VERSION = re.compile(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\b")


@dataclass(frozen=True)
class Drive:
    """A whole drive; ``model`` is empty if the drive does not report it.

    Attributes:
        discards: it accepts discards of free space.
    """

    name: str
    model: str
    bytes: int
    discards: bool = False

    @property
    def nvme(self) -> bool:
        """Whether it is an NVMe drive."""
        return self.name.startswith("nvme")


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's part of the machine.

    Args:
        driver: version of the kernel's module that is loaded; empty for none.
        models: model of each GPU that the driver has.
        on_bus: number of its GPUs on the PCI bus, with or without driver.
        nodes: number of them that can be opened here (``/dev/nvidia0`` and so on).
    """

    driver: str
    models: tuple[str, ...]
    on_bus: int
    nodes: int

    @property
    def branch(self) -> int:
        """First number of the driver's version, such as 580; 0 for none."""
        return int(self.driver.partition(".")[0] or 0)


@dataclass(frozen=True)
class DirectoryFacts:
    """A directory, its file system (None where the kernel does not tell) and the drives under it,
    none for one in memory or one that does not tell, such as a container's overlay.
    """

    folder: Path
    mount: Mount | None
    drives: list[Drive]

    @property
    def on_nvme(self) -> bool:
        """Whether it is on NVMe drives alone."""
        return bool(self.drives) and all(each.nvme for each in self.drives)


class Machine:
    """This machine. ``root`` is ``/`` except in tests; the trials are real."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self.memory = KernelMemory(root)

    def drives(self) -> list[Drive]:
        """Return the drives, by name."""
        folder = self._root / "sys/block"
        names = sorted(entry.name for entry in folder.glob("*"))
        return [self._drive(name) for name in names if not name.startswith(_NO_DRIVES)]

    def drives_under(self, device: int) -> list[Drive]:
        """Return the drives that hold a file system whose ``st_dev`` is ``device``."""
        number = f"{os.major(device)}:{os.minor(device)}"
        place = self._root / "sys/dev/block" / number
        return [self._drive(name) for name in self._disks(place)] if place.exists() else []

    def nvidia(self) -> Gpus:
        """Return NVIDIA's driver and GPUs."""
        message = self._text("proc/driver/nvidia/version")
        found = _DRIVER_VERSION.search(message)
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
        """Return the drives under a block device: itself, its partition's, its slaves'."""
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

    def node_pools(self) -> dict[str, HugePool]:
        """Return the pool of 2 MiB pages of each NUMA node."""
        found = {}
        for node in sorted((self._root / "sys/devices/system/node").glob("node[0-9]*")):
            folder = node / f"hugepages/hugepages-{HUGEPAGE_BYTES // 1024}kB"
            total, free = (_read(folder / name) for name in ("nr_hugepages", "free_hugepages"))
            if total.isdecimal() and free.isdecimal():
                found[node.name] = HugePool(HUGEPAGE_BYTES, int(total), int(free))
        return found

    def descriptors(self) -> int:
        """Return the limit of open files; -1 for none."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def direct_io(self, folder: Path) -> str:
        """Write a page past the page cache in ``folder``; return the error, or ""."""
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
        """Return ``st_dev`` of the file system that holds ``folder``; 0 if there is none."""
        try:
            return folder.stat().st_dev
        except OSError:
            return 0

    def disk_interface(self, name: str, depth: int) -> ProbeResult:
        """Try a kernel interface for disk I/O with a read."""
        return probe(name, depth)

    def place(self, folder: Path) -> DirectoryFacts:
        """Return what holds ``folder``."""
        real = folder.resolve()
        over = [each for each in self.mounts() if real.is_relative_to(each.point)]
        # If several are mounted on top of each other, the last one is visible.
        mount = max(reversed(over), key=lambda each: len(each.point.parts), default=None)
        return DirectoryFacts(folder, mount, self.drives_under(self.device_of(folder)))

    def mounts(self) -> list[Mount]:
        """Return all mounted file systems, in the kernel's order; none where it does not tell."""
        return mounts(self._root)

    def space(self, existing: Path, folder: Path) -> tuple[int, int]:
        """Return the bytes that are free for this user on the file system of ``existing``, and the
        bytes that the files of ``folder`` already have.
        """
        found = os.statvfs(existing)
        taken = 0
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            taken = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        return found.f_bavail * found.f_frsize, taken

    def trims_weekly(self) -> bool:
        """Return whether systemd's timer discards free space on drives."""
        wants = "systemd/system/timers.target.wants/fstrim.timer"
        places = (self._root / "etc" / wants, self._root / "usr/lib" / wants)
        return any(place.is_symlink() or place.exists() for place in places)

    def peer_pidfd(self) -> bool:
        """Return whether the kernel gives a pidfd of the process at the other end of a socket."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            pidfd = peer_of(ours).pidfd
        if pidfd >= 0:
            os.close(pidfd)
        return pidfd >= 0

    def populate(self) -> bool:
        """Return whether a lack of pages is an error instead of a signal (MADV_POPULATE_WRITE)."""
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            return advise(address_of(page), mmap.PAGESIZE, MADV_POPULATE_WRITE) == 0

    def collapse(self) -> int:
        """Collapse pages of a memfd into a huge page (MADV_COLLAPSE); return the error's number, 0
        for none.
        """
        return KernelMemory().collapses()

    def native_problem(self) -> str | None:
        """Return why the native module is not in use, or None if it is."""
        return native.available()

    def remote_problem(self, url: RemoteUrl, fleet_key: bytes) -> str:
        """Probe a remote by a helper process; return its problem, empty for none."""
        mover = Mover(url, fleet_key, [], 2 << 20, log_level="error")
        try:
            end = time.monotonic() + _REMOTE_S
            while not mover.up and mover.problem == mover.starting:
                if time.monotonic() > end:
                    return f"{url.place} does not answer in {_REMOTE_S:g} s; check the network"
                select.select([mover.event_fd], [], [], 0.2)
                mover.poll()
            return mover.problem
        finally:
            mover.close()


def _read(path: Path) -> str:
    """Return a file's text without surrounding blanks; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    return ""
