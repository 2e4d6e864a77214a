"""Drives and GPUs of this machine, as its kernel tells in /sys and /proc; nothing is opened."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

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
