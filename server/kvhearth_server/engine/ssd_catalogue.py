"""The namespaces and their epochs beside the SSD tier's blocks, so that these are of use after the
arena was lost: without its epoch a block cannot be told from one of other weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.ssd.settings import SsdSettings

FILE_NAME = "namespaces.json"
RESERVE_BYTES = 10 << 20
"""Of each directory's capacity, for this file and the one that replaces it."""
_FORMAT = 1
_FIELDS = ("lineage", "next_session", "epoch_floor", "namespaces")
_SESSIONS = 4096
"""Numbers of sessions that are taken at once: attaching must not cost a write to the drive."""
_PATIENCE_S = 0.25
"""So long the loop waits for a drive that may hang: an epoch that was bumped should be written
before anybody is told."""
_log = get_logger("kvhearth.engine")


class SsdCatalogue:
    """One file in each directory of the tier, the same in all; replaced as a whole.

    What cannot be written is counted and told, never fatal: the blocks under it are then of no use
    after a cold start, but still now. A thread for each directory writes, because a drive may hang;
    ``write`` waits for it a moment, and not at all for one that hung the last time.
    """

    def __init__(self, settings: SsdSettings | None, counters: Counters) -> None:
        self.paths = [place.path / FILE_NAME for place in settings.places] if settings else []
        sync = settings is not None and settings.flush
        self._copies = [_Copy(path, counters, sync=sync) for path in self.paths]
        self._number = 0

    def read(self) -> dict[str, Any] | None:
        """The content that was written last, of all directories; None if there is none."""
        found = [content for path in self.paths if (content := _read(path)) is not None]
        newest = max(found, key=lambda content: content["number"], default=None)
        if newest is not None:
            self._number = newest["number"]
        return newest

    def write(self, content: dict[str, Any]) -> None:
        """Replace the content, where it changed: lineage, next session, epochs and namespaces of
        the durable catalogue.
        """
        if not self.paths:
            return
        if not self._number:
            self.read()
        kept = {name: content[name] for name in _FIELDS}
        kept["next_session"] += _SESSIONS - kept["next_session"] % _SESSIONS
        data = json.dumps(kept, separators=(",", ":")).encode()
        late = [copy for copy in self._copies if copy.kept != data]
        if not late:
            return
        self._number += 1
        head = {"format": _FORMAT, "number": self._number}
        whole = json.dumps({**head, **kept, "check": _check({**head, **kept})}).encode()
        for copy in late:
            copy.put(data, whole)
        end = time.monotonic() + _PATIENCE_S
        for copy in late:
            copy.wait(end)


class _Copy:
    """The file in one directory."""

    def __init__(self, path: Path, counters: Counters, *, sync: bool) -> None:
        self.kept = b""
        """What the file was last told to say; empty after a failure, so that it is tried again with
        the next change of anything."""
        self._path = path
        self._counters = counters
        self._sync = sync
        self._changed = threading.Condition()
        self._wanted: tuple[bytes, bytes] | None = None
        self._busy = False
        self._hangs = False
        self._thread: threading.Thread | None = None

    def put(self, data: bytes, whole: bytes) -> None:
        """Have the file replaced; the newest content wins."""
        with self._changed:
            self.kept = data
            self._wanted = data, whole
            self._changed.notify_all()
        if self._thread is None:
            name = "kvhearth-namespaces"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def wait(self, end: float) -> None:
        """Until it is written, or the time is over."""
        with self._changed:
            if self._hangs and self._busy:
                return
            left = max(0.0, end - time.monotonic())
            self._hangs = not self._changed.wait_for(self._settled, left)
        if self._hangs:
            self._counters.add("ssd_catalogue_failures")
            _log.error("namespaces not written in time", path=str(self._path))

    def _settled(self) -> bool:
        return self._wanted is None and not self._busy

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                assert self._wanted is not None
                (data, whole), self._wanted, self._busy = self._wanted, None, True
            try:
                self._replace(whole)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._path.unlink()  # better none than one whose epochs may be old
                self._counters.add("ssd_catalogue_failures")
                _log.error("namespaces not written", path=str(self._path), error=str(error))
                with self._changed:
                    if self.kept == data:
                        self.kept = b""
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _replace(self, data: bytes) -> None:
        if 2 * len(data) > RESERVE_BYTES:
            raise OSError(f"{len(data)} bytes of namespaces are too many")
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, self._path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(content, dict) and content.get("format") == _FORMAT
    if not whole or not isinstance(content.get("number"), int):
        return None
    # One flipped bit in an epoch, and blocks of other weights would be believed.
    if content.pop("check", None) != _check(content):
        _log.error("the namespaces beside the SSD tier are damaged", path=str(path))
        return None
    return content if all(name in content for name in _FIELDS) else None


def _check(content: dict[str, Any]) -> str:
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
