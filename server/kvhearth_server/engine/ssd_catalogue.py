"""The namespaces and their epochs beside the SSD tier's blocks, so that these are of use after the
arena was lost: without its epoch a block cannot be told from one of other weights.
"""

from __future__ import annotations

import hashlib
import json
import os
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
_log = get_logger("kvhearth.engine")


class SsdCatalogue:
    """One file in each directory of the tier, the same in all; replaced as a whole.

    What cannot be written is counted and told, never fatal: the blocks under it are then of no use
    after a cold start, but still now.
    """

    def __init__(self, settings: SsdSettings | None, counters: Counters) -> None:
        self.paths = [place.path / FILE_NAME for place in settings.places] if settings else []
        self._sync = settings is not None and settings.flush
        self._counters = counters
        self._written = b""

    def read(self) -> dict[str, Any] | None:
        """The content that was written last, of all directories; None if there is none."""
        found = [content for path in self.paths if (content := _read(path)) is not None]
        return max(found, key=lambda content: content["number"], default=None)

    def write(self, content: dict[str, Any]) -> None:
        """Replace the content, if it changed: lineage, next session, epochs and namespaces of the
        durable catalogue.
        """
        if not self.paths:
            return
        kept = {name: content[name] for name in _FIELDS}
        kept["next_session"] += _SESSIONS - kept["next_session"] % _SESSIONS
        data = json.dumps(kept, separators=(",", ":")).encode()
        if data == self._written:
            return
        self._written = data
        number = 1 + max((old["number"] for p in self.paths if (old := _read(p))), default=0)
        head = {"format": _FORMAT, "number": number}
        whole = json.dumps({**head, **kept, "check": _check({**head, **kept})})
        for path in self.paths:
            try:
                self._replace(path, whole.encode())
            except OSError as error:
                self._written = b""  # it is tried again with the next change of anything
                self._counters.add("ssd_catalogue_failures")
                _log.error("namespaces not written", path=str(path), error=str(error))

    def _replace(self, path: Path, data: bytes) -> None:
        if 2 * len(data) > RESERVE_BYTES:
            raise OSError(f"{len(data)} bytes of namespaces are too many")
        fresh = path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, path)


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
