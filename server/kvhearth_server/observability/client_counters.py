"""What clients count and tell with their heartbeats, summed over all of them."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping

NAMES_MAX = 128
"""Most names that are summed; what comes later, or is no short word, is passed over."""

_ENDED_MAX = 256
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


class Reported:
    """Sums that only rise: a session's counters are added by what they rose since its last word.

    A client counts since its own start, so a session that follows another one of the same client
    goes on where that stood.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._last: dict[int, dict[str, int]] = {}
        self._ended: OrderedDict[int, dict[str, int]] = OrderedDict()

    def note(self, session: int, counters: Mapping[str, int]) -> None:
        """A heartbeat of ``session``; ``counters`` are bounded in number by the caller."""
        last = self._last.setdefault(session, {})
        for name, value in counters.items():
            rise = value - last.get(name, 0)
            if rise > 0 and self._known(name):
                self.totals[name] += rise
                last[name] = value

    def follow(self, session: int, previous: int) -> None:
        """``session`` is the same client's as ``previous``, which has ended."""
        stood = self._last.get(previous) or self._ended.get(previous)
        if stood is not None:
            self._last[session] = dict(stood)

    def forget(self, session: int) -> None:
        """The session is gone; what it added stays."""
        stood = self._last.pop(session, None)
        if stood is not None:
            self._ended[session] = stood
        while len(self._ended) > _ENDED_MAX:
            self._ended.popitem(last=False)

    def _known(self, name: str) -> bool:
        if name in self.totals:
            return True
        return len(self.totals) < NAMES_MAX and _NAME.fullmatch(name) is not None
