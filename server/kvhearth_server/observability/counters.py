"""Values of the daemon's counters, which the table of metrics declares, and sums of its clients'.

A counter only rises and starts at zero with the process. A labelled one is kept per value of its
label, and the number of values is bounded, because each becomes a time series.
"""

from __future__ import annotations

import collections
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

LABEL_VALUES_MAX = 32
"""Upper bound on the values of a counter's free label; later ones are counted as ``OTHER``."""

OTHER = "other"

_LABEL = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")


@dataclass(frozen=True)
class Counter:
    """A counter and the values of its label.

    Args:
        name: its name in the daemon and in ``/v1/stats``.
        label: the label's name; empty for a counter without.
        only: the only values of the label; empty for any short lower-case word.
        usual: for a free label, the values that metrics show from the start, as zero: a series that
            appears with its first event shows no rise, and an alert would miss that event.
    """

    name: str
    label: str = ""
    only: frozenset[str] = frozenset()
    usual: frozenset[str] = frozenset()

    @property
    def shown(self) -> frozenset[str]:
        """Label values that metrics show before anything was counted under them."""
        return self.only or self.usual


class Counters:
    """Values of all counters of ``table``. Any thread may add, hence the lock."""

    def __init__(self, table: Mapping[str, Counter]) -> None:
        self._lock = threading.Lock()
        self._table = table
        self._counts: dict[tuple[str, str], int] = {
            (name, ""): 0 for name, counter in table.items() if not counter.label
        }
        self._label_values: dict[str, set[str]] = {
            name: set() for name, counter in table.items() if counter.label
        }

    def add(self, name: str, n: int = 1, label: str = "") -> None:
        """Count ``n`` more (zero changes nothing).

        Raises:
            ValueError: a name that is not in the table, a negative count, a label where there is
                none (or the other way round), or one that is not among its counter's values.
        """
        with self._lock:
            if n >= 0 and (name, label) in self._counts:
                self._counts[name, label] += n
                return
        counter = self._table.get(name)
        if counter is None:
            raise ValueError(f"there is no counter {name!r}; add a metric that shows it")
        if n < 0:
            raise ValueError(f"counter {name} cannot fall by {-n}")
        if bool(label) != bool(counter.label):
            raise ValueError(f"counter {name} has label {counter.label!r}, got the value {label!r}")
        if counter.only and label not in counter.only:
            raise ValueError(f"counter {name}: {label!r} is no value of its label {counter.label}")
        if label and _LABEL.fullmatch(label) is None:
            raise ValueError(f"counter {name}: {label!r} is not a short lower-case word")
        if n == 0:
            return
        with self._lock:
            key = (name, self._bounded(name, counter, label))
            self._counts[key] = self._counts.get(key, 0) + n

    def add_all(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Add many counts by name and label value; see ``add``."""
        strange = []
        with self._lock:
            known = self._counts
            for place, n in counts.items():
                before = known.get(place)
                if n >= 0 and before is not None:
                    known[place] = before + n
                else:
                    strange.append((place, n))
        for (name, label), n in strange:
            self.add(name, n, label)

    def _bounded(self, name: str, counter: Counter, label: str) -> str:
        if not label or counter.only:
            return label
        seen = self._label_values[name]
        if label not in seen and len(seen) >= LABEL_VALUES_MAX:
            return OTHER
        seen.add(label)
        return label

    def get(self, name: str, label: str | None = None) -> int:
        """Return the count of one counter: of one label value, or (``None``) of all."""
        with self._lock:
            return sum(
                count
                for (each, value), count in self._counts.items()
                if each == name and label in (None, value)
            )

    def values(self) -> dict[tuple[str, str], int]:
        """Return all counters by name and label value (empty for a counter without)."""
        with self._lock:
            return dict(self._counts)

    def snapshot(self) -> dict[str, int]:
        """Return all counts by ``name`` or ``name{label value}``, labels that were seen only."""
        with self._lock:
            counts = sorted(self._counts.items())
        return {f"{name}{{{label}}}" if label else name: count for (name, label), count in counts}


NAMES_MAX = 128
"""Upper bound on a tenant's names that are summed; later ones, and no short words, are ignored.

A bound of all tenants together would let one of them use up the names of the others.
"""

FALLBACK = "fail_open_"
"""Begin of the names of clients' counters of decisions without the cache; a reason follows."""

_ENDED_MAX = 256
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


class Reported:
    """Monotonic sums of the clients' counters: each report adds a counter's rise since the
    session's last one.

    A client counts since its own start, so a session that follows another one of the same client
    continues from that one's counts.
    """

    def __init__(self) -> None:
        self.totals: collections.Counter[str] = collections.Counter()
        self._names: dict[str, set[str]] = {}
        self._last: dict[int, dict[str, int]] = {}
        self._ended: OrderedDict[int, dict[str, int]] = OrderedDict()

    def note(self, session: int, tenant: str, counters: Mapping[str, int]) -> dict[str, int]:
        """Add a heartbeat of ``session`` and return the rises; the caller bounds the number of
        ``counters``.
        """
        rises = dict[str, int]()
        names = self._names.setdefault(tenant, set())
        last = self._last.setdefault(session, {})
        for name, value in counters.items():
            rise = value - last.get(name, 0)
            if rise > 0 and _taken(name, names):
                self.totals[name] += rise
                last[name] = value
                rises[name] = rise
        return rises

    def of(self, session: int) -> Mapping[str, int]:
        """Return the last counters of an attached session's client, by name."""
        return self._last.get(session, {})

    def follow(self, session: int, previous: int) -> None:
        """Continue the counts of ``previous``, the same client's ended session, in ``session``."""
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


def _taken(name: str, names: set[str]) -> bool:
    """Whether a tenant's name is summed; adds it to ``names`` if there is room."""
    if name not in names and len(names) < NAMES_MAX and _NAME.fullmatch(name):
        names.add(name)
    return name in names
