"""Files that the daemon needs under their names and that others may remove: cleaners of temporary
directories, ``rm``, a volume that is mounted over them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvhearth.errors import KVHearthError
from kvhearth_server.engine.engine import Engine
from kvhearth_server.observability.logs import get_logger

LOOK_EVERY_S = 1.0
_log = get_logger("kvhearth.files")


class Vanished:
    """Looks for the files once a second, and puts back those that can be.

    Args:
        engine: is told; its arena's files are looked for, too.
        folder: makes the sockets' directory if that is gone.
        doors: files in it by name: the path, and what makes the file anew.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Callable[[], None],
        doors: Mapping[str, tuple[Path, Callable[[], None]]],
    ) -> None:
        self._engine, self._folder, self._doors = engine, folder, doors
        self._seen = {name: _identity(path) for name, (path, _) in doors.items()}

    async def run(self) -> None:
        """Look for as long as the task lives."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Look once."""
        for name, (path, make) in self._doors.items():
            found = _identity(path)
            if found is None or found != self._seen[name]:
                self._put_back(name, path, make, others=found is not None)
        gone = ", ".join(self._engine.arena.put_back())
        if gone and "arena" not in self._engine.notices:
            text = f"{gone} of the arena in {self._engine.arena.plan.folder} are gone"
            _log.warning("arena.files_gone", files=gone, hint="the next start will be cold")
            self._engine.notices["arena"] = f"{text}: the next start will be cold"

    def _put_back(self, name: str, path: Path, make: Callable[[], None], *, others: bool) -> None:
        engine = self._engine
        try:
            if others:
                raise FileExistsError(0, "somebody else made another one in its place")
            self._folder()
            make()
        except (OSError, KVHearthError) as error:
            reason = f"{path} was removed and cannot be made again: {_why(error)}"
            if engine.doors_shut.get(name) != reason:
                _log.warning("door.shut", door=name, path=str(path), error=_why(error))
            engine.doors_shut[name] = reason
            return
        self._seen[name] = _identity(path)
        engine.doors_shut.pop(name, None)
        engine.counters.add("door_restarts", 1, name)
        engine.notices[name] = f"{path} was removed and made again: keep cleaners off its directory"
        _log.warning("door.open_again", door=name, path=str(path))


def _why(error: OSError | KVHearthError) -> str:
    return error.message if isinstance(error, KVHearthError) else str(error.strerror)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one under its name; None if it is not there."""
    try:
        facts = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
