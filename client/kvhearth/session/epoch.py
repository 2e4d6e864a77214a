"""The epoch of an engine's weights, and its change when the daemon starts cold."""

from __future__ import annotations

import threading

EPOCH_UNKNOWN = -1


class WeightsEpoch:
    """This engine's epoch, and the daemon's last reported one. Thread-safe.

    An engine gets no new weights because another one did, so its epoch follows only its own calls.
    But a daemon that starts cold has none of the old blocks and begins at an epoch that no earlier
    run used; its welcome names another lineage. An engine whose epoch was the daemon's at the last
    contact adopts the new one. A daemon that starts warm keeps lineage and epochs: a higher epoch
    is another engine's bump. If a daemon names no lineage, a cold start cannot be recognized, so
    the engine keeps its epoch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: int | None = None
        self._daemon = EPOCH_UNKNOWN
        self._boot_id = ""
        self._lineage = ""

    @property
    def own(self) -> int:
        """Epoch of this engine's weights; -1 while it is not known."""
        own = self._own
        return EPOCH_UNKNOWN if own is None else own

    @property
    def daemon(self) -> int:
        """The daemon's last reported epoch; -1 before the first report."""
        return self._daemon

    def use(self, epoch: int) -> None:
        """Set the epoch of the engine's weights; -1 for none."""
        with self._lock:
            self._own = epoch

    def bumped(self, boot_id: str, epoch: int) -> None:
        """Record the daemon's bump to ``epoch``, which this engine's weights now have."""
        with self._lock:
            self._own = epoch
            self._note(boot_id, epoch)

    def attached(self, boot_id: str, epoch: int, lineage: str = "") -> None:
        """Record a welcome; ``lineage`` identifies the daemon's cold start, "" if not given."""
        with self._lock:
            cold = "" not in (lineage, self._lineage) and lineage != self._lineage
            if self._own is None or (cold and self._own == self._daemon):
                self._own = epoch
            if boot_id != self._boot_id:
                self._boot_id, self._daemon = boot_id, EPOCH_UNKNOWN
            self._lineage = lineage
            self._note(boot_id, epoch)

    def heard(self, boot_id: str, epoch: int) -> None:
        """Record the epoch of a heartbeat's reply; replies of an earlier boot are ignored."""
        with self._lock:
            self._note(boot_id, epoch)

    def _note(self, boot_id: str, epoch: int) -> None:
        if boot_id == self._boot_id:
            # Replies may overtake each other; within a boot an epoch only grows.
            self._daemon = max(self._daemon, epoch)
