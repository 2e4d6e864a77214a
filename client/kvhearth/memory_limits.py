"""Limits of memory that hold for this process: control groups of both versions, address space."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SPACE_SPARE_BYTES = 1 << 30
"""Address space beside the memory that is asked for: stacks and heaps of threads. A daemon with
nothing but its arena takes 0.65 GiB; with less it hangs or is ended by the C library.
"""
_SPACE_NAME = "RLIMIT_AS (ulimit -v; threads take 1GiB of it)"


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of memory.

    Attributes:
        name: the file or setting that has it, for an operator.
        bytes: the limit.
        free_bytes: bytes that may still be taken.
    """

    name: str
    bytes: int
    free_bytes: int


class _Files(NamedTuple):
    limit: str
    used: str
    page_cache: tuple[str, str]


_V1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


@dataclass(frozen=True)
class MemoryGroup:
    """A control group that limits memory, of version 1 or 2."""

    root: Path
    folder: Path
    files: _Files

    def limits(self) -> list[MemoryLimit]:
        """Return its limit as it is now; none where it has none."""
        path = self.folder / self.files.limit
        limit = _text(path)
        if not limit.isdecimal():
            return []
        used = int(_text(self.folder / self.files.used) or 0)
        free = int(limit) - used + self._page_cache_bytes()
        return [MemoryLimit(f"/{path.relative_to(self.root)}", int(limit), max(free, 0))]

    def _page_cache_bytes(self) -> int:
        """Bytes that it would release under pressure (file pages, not shared memory)."""
        rows = (line.split() for line in _text(self.folder / "memory.stat").splitlines())
        return sum(int(row[1]) for row in rows if row[0] in self.files.page_cache)


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Return this process's control groups and their parents, in each mounted hierarchy.

    ``root`` has /proc and /sys; it is ``/`` except in tests.
    """
    own, found = _own_groups(root), list[MemoryGroup]()
    for mount in mounts(root):
        if mount.kind == "cgroup2":
            group, files = own.get("", "/"), _V2
        elif mount.kind == "cgroup" and "memory" in mount.options:
            group, files = own.get("memory", "/"), _V1
        else:
            continue
        top = root / mount.point.relative_to("/")
        found += [MemoryGroup(root, each, files) for each in _folders(top, mount.shown, group)]
    return found


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes:
        device: major and minor number, as ``0:32``.
        shown: the directory of the file system that is mounted.
        options: those of the mount and of the file system.
    """

    device: str
    shown: str
    point: Path
    kind: str
    options: frozenset[str]


def mounts(root: Path = Path("/")) -> list[Mount]:
    """Return all mounts, in the kernel's order; none where it does not tell."""
    found = list[Mount]()
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        words, kind = fields.split(), rest.split()
        if len(words) >= 6 and len(kind) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
            options = frozenset((*words[5].split(","), *kind[2].split(",")))
            found.append(Mount(words[2], words[3], Path(point), kind[0], options))
    return found


def address_space(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limit of this process's address space, if it has one."""
    for line in _text(root / "proc/self/limits").splitlines():
        name, _, values = line.partition("address space")
        if name.strip() == "Max" and (soft := values.split()[0]).isdecimal():
            taken = int(_text(root / "proc/self/statm").split()[0]) * mmap.PAGESIZE
            free = int(soft) - taken - _SPACE_SPARE_BYTES
            return [MemoryLimit(_SPACE_NAME, int(soft), max(free, 0))]
    return []


def tightest(limits: Iterable[MemoryLimit]) -> MemoryLimit | None:
    """Return the limit that leaves the least; None without one."""
    return min(limits, key=lambda each: each.free_bytes, default=None)


def _own_groups(root: Path) -> dict[str, str]:
    """Return this process's group by controller of version 1; "" is version 2's."""
    groups: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _folders(top: Path, mounted: str, group: str) -> list[Path]:
    """Return a group's folder and those above it, up to the mount point.

    In a container the mount shows a part of the hierarchy (``mounted``), and the group's path may
    be the host's.
    """
    inside = Path(group)
    below = inside.relative_to(mounted) if inside.is_relative_to(mounted) else Path()
    folder = top / below
    return [folder, *folder.parents[: len(below.parts)]]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()  # has paths
    except OSError:
        return ""
