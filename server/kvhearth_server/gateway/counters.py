"""Counts of what a gateway did, reported to its daemon, whose metrics show them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

from kvhearth.url import UnixUrl
from kvhearth.wire.handshake import encode_frame
from kvhearth.worker_thread import SupervisedThread

_EVERY_S = 1.0
_SEND_S = 5.0


class ReportedCounters:
    """Counters by name and label (``observability.metrics.gateway``). Thread-safe.

    Once a second they go to the daemon; those that it did not take go with the next ones.

    Args:
        url: the daemon.
    """

    def __init__(self, url: UnixUrl) -> None:
        self._path = url.attach_path
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._thread = SupervisedThread("gateway-report", self._step)

    def add(self, name: str, label: str = "", count: int = 1) -> None:
        """Count ``count`` more."""
        with self._lock:
            self._counts[name, label] += count

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """Report the last ones."""
        self._thread.stop(1.0)
        self._report()

    def _step(self) -> None:
        self._thread.rest(_EVERY_S)
        self._report()

    def _report(self) -> None:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        rows = [(name, label, count) for (name, label), count in counts.items()]
        if rows and not self._send(rows):
            with self._lock:
                self._counts.update(counts)

    def _send(self, rows: list[tuple[str, str, int]]) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line,
        ):
            line.settimeout(_SEND_S)
            line.connect(self._path)
            line.sendall(encode_frame({"kind": "counts", "counts": rows}))
            # A refusal is final as well: sending the same again would be refused again.
            return bool(line.recv(1))
        return False
