"""A world's directories: sockets and logs, the arena on tmpfs, the SSD directory on a drive."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.pages import FilesystemKind, filesystem_kind
from kvhearth_server.torture import damage
from kvhearth_server.units import format_size

_EVERY_S = 0.02
_SOCKETS_CHARS = 60
_ARENA_BYTES, _DRIVE_BYTES = 300 << 20, 400 << 20


@dataclass(frozen=True)
class Roots:
    """Where worlds are made.

    Attributes:
        arena: on tmpfs (or hugetlbfs).
        drive: on the drive that is to be tried.
    """

    arena: Path
    drive: Path

    def check(self, *, ssd: bool = True) -> None:
        """Raise KVHearthError ``config_invalid`` unless both can be used, and have room: what is
        lost because a world does not fit would be taken for the daemon's doing. Without ``ssd``
        there are only logs on the drive.
        """
        rooms = (
            ("--arena-root", self.arena, _ARENA_BYTES),
            ("--dir", self.drive, _DRIVE_BYTES if ssd else 0),
        )
        for name, path, needed in rooms:
            try:
                # Only a try tells: root may write to anything, by its permissions.
                with tempfile.TemporaryFile(prefix="kvh-", dir=path), _folder(path):
                    pass
            except OSError as error:
                raise KVHearthError(
                    Reason.CONFIG_INVALID,
                    f"{name} {path} is no directory that can be written to ({error.strerror})",
                ) from None
            free = shutil.disk_usage(path).free
            if free < needed:
                raise KVHearthError(
                    Reason.CONFIG_INVALID,
                    f"{name} {path}: {format_size(free)} are free, {format_size(needed)} are "
                    "needed; give another directory",
                )
        if filesystem_kind(self.arena).kind is FilesystemKind.OTHER:
            raise KVHearthError(
                Reason.CONFIG_INVALID,
                f"--arena-root {self.arena} is neither on tmpfs nor on hugetlbfs, and an arena is "
                "memory; give a directory such as /dev/shm",
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
    with contextlib.ExitStack() as made:
        folder = made.enter_context(_folder(roots.drive, keep))
        # A socket's path has 107 characters: the sockets are near the root where the drive is not.
        near = None if len(str(folder)) > _SOCKETS_CHARS else folder
        sockets = near or made.enter_context(_folder(None, keep))
        arena = made.enter_context(_folder(roots.arena))
        ssd = folder / "ssd"
        ssd.mkdir()
        yield Places(sockets, arena, ssd)


@contextlib.contextmanager
def _folder(root: Path | None, keep: Sequence[bool] = ()) -> Iterator[Path]:
    """A new directory, removed at the end unless there is something in ``keep``."""
    path = Path(tempfile.mkdtemp(prefix="kvh-", dir=root))
    try:
        yield path
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


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
            self.most_bytes = max(self.most_bytes, damage.claimed_bytes(self._path))
        return self.most_bytes

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()
