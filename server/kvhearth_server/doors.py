"""The daemon's sockets and its token: a directory that is checked, locked and held open, and files
in it that are made again when others remove them: cleaners of temporary directories, ``rm``, a
volume that is mounted over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.engine.engine import Engine, ShutDoor
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.ownership import check_own

LOOK_EVERY_S = 1.0
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that end without a restart."""
_log = get_logger("kvhearth.files")

Doors = Mapping[str, tuple[str, Callable[[Path], Awaitable[None] | None]]]
"""By the door's name: its file's name, and what makes that file."""


def claimed(folder: Path, how: int = fcntl.LOCK_EX) -> int:
    """Return a descriptor of a socket directory that is the daemon's alone, locked while it is
    open, so that two daemons cannot race.

    Raises:
        KVHearthError: ``socket_unusable``: another daemon has it.
        OSError: it cannot be opened, is a link, or others may write to it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        if not folder.is_symlink():
            raise
        message = "it is a symbolic link, which may come to lead elsewhere (name its target)"
        raise PermissionError(errno.EPERM, message, str(folder)) from None
    try:
        check_own(descriptor, folder)
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE, f"another daemon serves {folder}; choose another --socket-dir"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def refusal(folder: Path, error: OSError) -> KVHearthError:
    """Return the error for a socket directory that cannot be used."""
    message = f"cannot use {folder}: {error.strerror}; choose another --socket-dir"
    return KVHearthError(Reason.SOCKET_UNUSABLE, message)


class SocketDirectory:
    """The directory of the sockets.

    Files in it are named by way of its descriptor: whatever comes to its path after the checks, no
    socket and no token goes there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def __truediv__(self, name: str) -> Path:
        """Return the path of a file in it, for this process."""
        return Path(f"/proc/self/fd/{self._descriptor}") / name

    def claim(self) -> None:
        """Make it if it is not there, check it and lock it, and leave the one before, if there is
        another one at its path. Raises as ``claimed``.
        """
        if self._descriptor >= 0 and _identity(self.path) == _identity(self._descriptor):
            check_own(self._descriptor, self.path)
            return
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o750, parents=True)
        new = claimed(self.path)
        self.leave()
        self._descriptor = new

    def leave(self) -> None:
        """Let another daemon have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OpenDoors:
    """Opens the doors, and looks for their files once a second, to make those again that are gone.

    Args:
        engine: is told; its arena's files are looked for, too.
        directory: claimed.
        doors: opened in this order.
    """

    def __init__(self, engine: Engine, directory: SocketDirectory, doors: Doors) -> None:
        self._engine, self._directory, self._doors = engine, directory, doors
        self._seen = dict[str, tuple[int, int] | None]()

    async def open(self) -> None:
        """Open all doors.

        Raises:
            KVHearthError: ``socket_unusable``.
        """
        try:
            for door in self._doors:
                await self._make(door)
        except OSError as error:
            raise refusal(self._directory.path, error) from None

    def close(self) -> None:
        """Remove the files."""
        for name, _ in self._doors.values():
            (self._directory / name).unlink(missing_ok=True)

    async def run(self, stopping: asyncio.Future[str]) -> None:
        """Look until the daemon stops."""
        while not stopping.done():
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Look once."""
        for door, (name, _) in self._doors.items():
            if _identity(self._directory.path / name) != self._seen[door]:
                await self._put_back(door, self._directory.path / name)
        gone = ", ".join(self._engine.arena.put_back())
        if gone and "arena" not in self._engine.notices:
            text = f"{gone} of the arena in {self._engine.arena.plan.folder} are gone"
            _log.warning("arena.files_gone", files=gone, hint="the next start will be cold")
            self._engine.notices["arena"] = f"{text}: the next start will be cold"

    async def _make(self, door: str) -> None:
        name, make = self._doors[door]
        path = self._directory / name
        path.unlink(missing_ok=True)  # whoever made it does not hold the directory's lock
        if (made := make(path)) is not None:
            await made
        self._seen[door] = _identity(path)

    async def _put_back(self, door: str, path: Path) -> None:
        engine = self._engine
        try:
            self._directory.claim()
            await self._make(door)
        except (OSError, KVHearthError) as error:
            self._shut(door, path, error)
            return
        engine.doors_shut.pop(door, None)
        engine.counters.add("door_restarts", 1, door)
        engine.notices[door] = f"{path} was removed and made again: keep cleaners off its directory"
        _log.warning("door.open_again", door=door, path=str(path))

    def _shut(self, door: str, path: Path, error: OSError | KVHearthError) -> None:
        """Note that a door cannot be opened again."""
        why = error.message if isinstance(error, KVHearthError) else str(error.strerror)
        reason = f"{path} was removed and cannot be made again: {why}"
        before = self._engine.doors_shut.get(door)
        if before is None or before.reason != reason:
            _log.warning("door.shut", door=door, path=str(path), error=why)
        passes = isinstance(error, KVHearthError) or error.errno in _PASSING
        since = self._engine.now() if before is None else before.since
        self._engine.doors_shut[door] = ShutDoor(reason, since, passes=passes)


def _identity(place: Path | int) -> tuple[int, int] | None:
    """Return what tells a file from another one under its name; None if it is not there."""
    try:
        facts = os.fstat(place) if isinstance(place, int) else os.lstat(place)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
