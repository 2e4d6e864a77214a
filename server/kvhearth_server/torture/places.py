"""A world's directories: sockets and logs, the arena on tmpfs, the SSD directory on a drive."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.torture import damage

_EVERY_S = 0.02


@dataclass(frozen=True)
class Roots:
    """Where worlds are made.

    Attributes:
        arena: on tmpfs (or hugetlbfs).
        drive: on the drive that is to be tried.
    """

    arena: Path
    drive: Path

    def check(self) -> None:
        """Raise KVHearthError ``config_invalid`` unless both can be used."""
        for name, path in (("--arena-root", self.arena), ("--dir", self.drive)):
            if not path.is_dir() or not os.access(path, os.W_OK):
                raise KVHearthError(
                    Reason.CONFIG_INVALID, f"{name} {path} is no directory that can be written to"
                )


@dataclass(frozen=True)
class Places:
    """Directories of one world."""

    folder: Path
    arena: Path
    ssd: Path

    @property
    def orders(self) -> Path:
        """The file that commands the drive."""
        return self.folder / "drive.json"

    @property
    def clock(self) -> Path:
        """The file that the daemon's clocks follow."""
        return self.folder / "clock"


@contextlib.contextmanager
def places(roots: Roots, keep: list[bool]) -> Iterator[Places]:
    """Directories of one world, removed at the end unless something was put into ``keep``."""
    folder = Path(tempfile.mkdtemp(prefix="kvh-", dir=roots.drive))
    # A socket's path has 107 characters: the sockets are near the root where the drive is not.
    sockets = Path(tempfile.mkdtemp(prefix="kvh-")) if len(str(folder)) > 60 else folder
    arena = Path(tempfile.mkdtemp(prefix="kvh-", dir=roots.arena))
    ssd = folder / "ssd"
    ssd.mkdir()
    try:
        yield Places(sockets, arena, ssd)
    finally:
        shutil.rmtree(arena, ignore_errors=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(sockets, ignore_errors=True)


class CapacityWatch(threading.Thread):
    """Looks all the time at what a directory takes, by its file system's count."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="kvhearth-capacity", daemon=True)
        self.most_bytes = 0
        self._path = path
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()

    def look(self) -> int:
        """Look once; the most that was ever seen."""
        with contextlib.suppress(FileNotFoundError):
            self.most_bytes = max(self.most_bytes, damage.taken_bytes(self._path))
        return self.most_bytes

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()
