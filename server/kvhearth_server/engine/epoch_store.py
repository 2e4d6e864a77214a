"""Stores the namespaces and their epochs beside the SSD tier's blocks.

The blocks stay usable if the arena is lost: without its epoch, a block cannot be told from one of
other weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvhearth.clock import REAL_TIME, Clock
from kvhearth.errors import KVHearthError, Reason
from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.memory.durable_file import catalogue_text, framed, unframed
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.ownership import read_own, replace_file, sync_directory
from kvhearth_server.tiers.base import NAMESPACES_NAME, DirectoryError, ask_each

FILE_NAME = NAMESPACES_NAME
RESERVE_BYTES = 10 << 20
"""Bytes of each directory's capacity reserved for this file and its replacement."""
_FIELDS = ("lineage", "next_session", "epoch_floor", "namespaces")
_SESSIONS = 4096
"""Session numbers reserved at once, so that attaching does not cost a write to the drive."""
_OPEN_S = 10.0
"""Time that each directory has to answer at the start."""
_PATIENCE_S = 0.01
"""Time that the loop itself waits for a drive; most writes are done by then."""
_AWAIT_S = 1.5
"""Longest wait of an answer that promises durability; less than a client's default timeout."""
_LOOK_S = 0.005
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 0.5
"""Pauses between retries, short at first: until then, a crash costs every block in the tier."""
_log = get_logger("kvhearth.engine")


class EpochStore:
    """One file in each directory of the tiers, identical in all and replaced as a whole.

    A failed write is counted, logged and retried, and is never fatal: the blocks concerned stay
    usable now, but not after a cold start. Each directory has its own writer thread, because a
    drive may hang.
    """

    def __init__(
        self, folders: Sequence[Path], counters: Counters, clock: Clock = REAL_TIME
    ) -> None:
        self.paths = [folder / FILE_NAME for folder in folders]
        self._copies = [_Copy(path, counters) for path in self.paths]
        self._clock = clock
        self._counters = counters
        self._number = 0

    def read(self) -> dict[str, Any] | None:
        """Return the newest content of all directories, or None if there is none that can be
        trusted.

        A directory that is not writable may not have been writable when the content changed last,
        so its content may be old. It is trusted only if another directory agrees. A directory that
        hangs does not count.
        """
        found = self._found()
        newest = max(found, key=lambda said: said.number, default=None)
        if newest is None:
            return None
        self._number = max(self._number, newest.number)
        sayers = [said for said in found if said.number == newest.number]
        if not any(said.writable for said in sayers):
            _log.error(
                "ssd_catalogue.old",
                paths=[str(said.path) for said in sayers],
                message="not writable, so it may be old: starting without it",
            )
            return None
        return newest.content

    def _found(self) -> list[_StoredContent]:
        """Return the content of each directory that has some and answers in time."""
        found = []
        for said in ask_each(self.paths, _read, _OPEN_S, clock=self._clock).values():
            if isinstance(said, DirectoryError):
                self._counters.add("ssd_catalogue_failures")
                _log.error("ssd_catalogue.not_read", error=str(said))
            elif said is not None:
                found.append(said)
        return found

    def write(self, content: dict[str, Any], namespaces: Sequence[str]) -> None:
        """Replace the content if it changed: lineage, next session, epochs and namespaces of the
        durable catalogue. One thread at a time may call it.

        Args:
            namespaces: JSON objects.
        """
        if not self.paths:
            return
        if not self._number:
            self.read()
        kept = {name: content[name] for name in _FIELDS if name != "namespaces"}
        kept["next_session"] += _SESSIONS - kept["next_session"] % _SESSIONS
        data = catalogue_text(kept, namespaces)
        late = [copy for copy in self._copies if copy.kept != data]
        if not late:
            return
        # The next number alone will not do: a directory that was away may have a greater one.
        self._number = max(self._number + 1, int(time.time()))
        whole = framed(self._number, data)
        for copy in late:
            copy.put(data, whole)
        end = time.monotonic() + _PATIENCE_S
        for copy in late:
            copy.wait(end)

    def close(self) -> None:
        """End the threads that write; one whose drive hangs is left behind."""
        for copy in self._copies:
            copy.close()

    async def confirm(self) -> None:
        """Wait until no directory can bring back what the last ``write`` invalidated: one of them
        holds the new content, or all have lost the old one.

        Raises:
            KVHearthError: ``ssd_unusable`` if neither holds in time.
        """
        end = time.monotonic() + _AWAIT_S
        while not self._safe:
            if time.monotonic() > end or all(copy.failed for copy in self._copies):
                where = ", ".join(str(path) for path in self.paths)
                self._counters.add("ssd_catalogue_failures")
                _log.error(
                    "ssd_catalogue.not_safe",
                    paths=where,
                    message="epoch bump not durable: stale blocks may reappear after a restart",
                )
                raise KVHearthError(
                    Reason.SSD_UNUSABLE,
                    f"the change holds, but cannot be written to {where}: older blocks could "
                    "come back after a restart; see kvhearth_ssd_degraded, then ask again",
                )
            await asyncio.sleep(_LOOK_S)

    @property
    def _safe(self) -> bool:
        copies = self._copies
        return any(copy.stands for copy in copies) or all(copy.removed for copy in copies)


class _StoredContent(NamedTuple):
    """Content of a directory's file, and whether the file could be replaced."""

    path: Path
    number: int
    content: dict[str, Any]
    writable: bool


class _Copy:
    """The file in one directory."""

    def __init__(self, path: Path, counters: Counters) -> None:
        self.kept = b""
        """Content that the file was last asked to hold."""
        self.removed = False
        """True if the file could not be written and no longer exists."""
        self.failed = False
        """True if the file could neither be written nor removed: it may hold invalidated epochs."""
        self._path = path
        self._counters = counters
        self._wanted: bytes | None = None
        self._again: bytes | None = None
        """Content whose write failed, to be tried again after ``_pause_s``."""
        self._pause_s = _RETRY_MIN_S
        self._busy = self._started = False
        self._worker = SupervisedThread("kvhearth-namespaces", self._step)
        self._changed = self._worker.changed

    @property
    def stands(self) -> bool:
        """Whether the file durably holds the content last requested."""
        with self._changed:
            return self._settled() and not (self.removed or self.failed)

    def put(self, data: bytes, whole: bytes) -> None:
        """Request that the file be replaced; the newest content wins."""
        with self._changed:
            self.kept = data
            self._wanted = whole
            self.removed = self.failed = False
            self._changed.notify_all()
        if not self._started:
            self._started = True
            self._worker.start()

    def close(self) -> None:
        """End the thread."""
        if self._started:
            self._worker.stop(_AWAIT_S)

    def wait(self, end: float) -> None:
        """Wait until the content is written or the time is over."""
        with self._changed:
            self._changed.wait_for(self._settled, max(0.0, end - time.monotonic()))

    def _settled(self) -> bool:
        return self._wanted is None and not self._busy

    def _step(self) -> None:
        with self._changed:
            wait_s = None if self._again is None else self._pause_s
            self._changed.wait_for(
                lambda: self._wanted is not None or self._worker.stopping, wait_s
            )
            first = self._wanted is not None
            whole = self._wanted or self._again
            if whole is None:
                return
            self._wanted, self._busy = None, True
        self._pause_s = _RETRY_MIN_S if first else min(2 * self._pause_s, _RETRY_MAX_S)
        self._again = whole
        if self._try(whole, tell=first):
            self._again = None

    def _try(self, whole: bytes, *, tell: bool) -> bool:
        """Replace the file. If that fails, remove what is left: its epochs may be old."""
        removed, failed = False, True
        try:
            if 2 * len(whole) > RESERVE_BYTES:
                raise OSError(f"{len(whole)} bytes of namespaces are too many")
            replace_file(self._path, whole)
            failed = False
        except OSError as error:
            removed = _remove(self._path)
            failed = not removed
            self._counters.add("ssd_catalogue_failures")
            if tell:
                _log.error("ssd_catalogue.not_written", path=str(self._path), error=str(error))
        finally:
            with self._changed:
                self._busy = False
                if self._wanted is None:
                    self.removed, self.failed = removed, failed
                self._changed.notify_all()
        return not (removed or failed)


def _remove(path: Path) -> bool:
    """Remove a file durably; return False if that is not certain."""
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sync_directory(path.parent)
    except OSError:
        return False
    return True


def _read(path: Path) -> _StoredContent | None:
    try:
        data = read_own(path, RESERVE_BYTES)
    except OSError:
        return None
    # With one flipped bit in an epoch, blocks of other weights would be trusted.
    found = unframed(data)
    if found is None:
        _log.error("ssd_catalogue.damaged", path=str(path))
        return None
    number, text = found
    content = json.loads(text)
    return _StoredContent(
        path, number, content, os.access(path.parent, os.W_OK, effective_ids=True)
    )
