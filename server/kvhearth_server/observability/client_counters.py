"""Counters that clients report with their heartbeats, summed over all clients."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping

NAMES_MAX = 128
"""Upper bound on the names that are summed; later names, and any that are no short word, are
ignored.
"""

_ENDED_MAX = 256
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


class Reported:
    """Monotonic sums of the clients' counters: each report adds a counter's rise since the
    session's last one.

    A client counts since its own start, so a session that follows another one of the same client
    continues from that one's counts.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._last: dict[int, dict[str, int]] = {}
        self._ended: OrderedDict[int, dict[str, int]] = OrderedDict()

    def note(self, session: int, counters: Mapping[str, int]) -> None:
        """Add a heartbeat of ``session``; the caller bounds the number of ``counters``."""
        last = self._last.setdefault(session, {})
        for name, value in counters.items():
            rise = value - last.get(name, 0)
            if rise > 0 and self._known(name):
                self.totals[name] += rise
                last[name] = value

    def follow(self, session: int, previous: int) -> None:
        """Continue the counts of ``previous``, an ended session of the same client, in
        ``session``.
        """
        stood = self._last.get(previous) or self._ended.get(previous)
        if stood is not None:
            self._last[session] = dict(stood)

    def forget(self, session: int) -> None:
        """Forget a session; its contribution stays."""
        stood = self._last.pop(session, None)
        if stood is not None:
            self._ended[session] = stood
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)

    def _known(self, name: str) -> bool:
        if name in self.totals:
            return True
        return len(self.totals) < NAMES_MAX and _NAME.fullmatch(name) is not None
