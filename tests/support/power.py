"""A drive that forgets at a power cut what was not synced."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest


class Drive:
    """The drive of one folder, empty at first. ``fsync`` and ``fdatasync`` take note of the names
    or the bytes that they make durable, and do not reach the real drive.

    Attributes:
        moments: contents after a power cut right before each sync, if ``watched``.
        broken: syncs of files fail.
        awake: no sync ends while it is clear.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, *, watched: bool = False) -> None:
        self.moments: list[dict[str, bytes]] = []
        self.broken = False
        self.awake = threading.Event()
        self.awake.set()
        self._folder, self._watched = folder, watched
        self._names: dict[str, int] = {}
        self._bytes: dict[int, bytes] = {}
        self._held: list[int] = []
        self._lock = threading.Lock()
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(os, "fdatasync", self._sync)

    def cut(self, *, all_names: bool = False) -> dict[str, bytes]:
        """Return the files after a power cut.

        Args:
            all_names: the file system had written all names by itself, as it may at any time.
        """
        names = self._names_now() if all_names else self._names
        return {name: self._bytes.get(number, b"") for name, number in names.items()}

    def cut_to(self, folder: Path) -> Path:
        """Make the files after a power cut in a new folder."""
        folder.mkdir()
        for name, data in self.cut().items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o600)
        return folder

    def close(self) -> None:
        """Close the files that were kept open so that their inodes keep their numbers."""
        while self._held:
            os.close(self._held.pop())

    def _sync(self, fd: int) -> None:
        self.awake.wait()
        with self._lock:
            if self._watched:
                self.moments += [self.cut(), self.cut(all_names=True)]
            facts = os.fstat(fd)
            if stat.S_ISDIR(facts.st_mode):
                assert os.path.samestat(facts, self._folder.stat())
                self._names = self._names_now()
            elif self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            else:
                # A descriptor of its own: the given one may be for writing or for aligned reads.
                self._held.append(own := os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
                self._bytes[facts.st_ino] = os.pread(own, facts.st_size, 0)

    def _names_now(self) -> dict[str, int]:
        return {path.name: path.lstat().st_ino for path in self._folder.iterdir()}
