"""Reports of a gateway's counts to its daemon, whose metrics show them."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Callable

from kvhearth.url import UnixUrl
from kvhearth.wire.handshake import encode_frame
from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.gateway.tally import COUNTS_MAX, Tally

_EVERY_S = 1.0
_SEND_S = 5.0


class Reporter:
    """Sends counts once a second; those that the daemon did not take go with the next ones.

    Args:
        url: the daemon.
        sources: further counters that only rise, by the counter's name.
    """

    def __init__(
        self, url: UnixUrl, tally: Tally, sources: dict[str, Callable[[], Counter[str]]]
    ) -> None:
        self._path = url.attach_path
        self._tally = tally
        self._sources = sources
        self._seen: dict[str, Counter[str]] = {name: Counter() for name in sources}
        self.thread = SupervisedThread("gateway-report", self._step)

    def _step(self) -> None:
        self.thread.rest(_EVERY_S)
        self.tell()

    def tell(self) -> None:
        """Send the counts of now."""
        for name, read in self._sources.items():
            now = Counter(read())
            for label, count in (now - self._seen[name]).items():
                self._tally.add(name, count, label)
            self._seen[name] = now
        counts = self._tally.take()
        rows = [(name, label, count) for (name, label), count in counts.items()]
        for at in range(0, len(rows), COUNTS_MAX):
            part = rows[at : at + COUNTS_MAX]
            if not self._send(part):
                for name, label, count in part:
                    self._tally.add(name, count, label)

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
