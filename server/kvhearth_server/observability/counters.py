"""What the daemon counts and times: its counters, sums of its clients' ones, calls, ages of blocks.

A counter only rises and starts at zero with the process. A labelled one is kept per value of its
label, and the number of values is bounded, because each becomes a time series.
"""

from __future__ import annotations

import asyncio
import collections
import re
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32

LABEL_VALUES_MAX = 32
"""Upper bound on the values of a counter's label that its table does not name; later ones are
counted as ``OTHER``.
"""

OTHER = "other"

_LABEL = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")


@dataclass(frozen=True)
class Counter:
    """A counter and the values of its label.

    Args:
        name: its name in the daemon and in ``/v1/stats``.
        label: the label's name; empty for a counter without.
        words: values of the label that metrics show from the start, as zero: a series that appears
            with its first event shows no rise, and an alert would miss that event.
    """

    name: str
    label: str = ""
    words: frozenset[str] = frozenset()


class Counters:
    """Values of all counters of ``table``. Any thread may add, hence the lock."""

    def __init__(self, table: Mapping[str, Counter]) -> None:
        self._lock = threading.Lock()
        self._table = table
        self._counts = {
            name: dict.fromkeys(counter.words if counter.label else ("",), 0)
            for name, counter in table.items()
        }

    def add(self, name: str, n: int = 1, label: str = "") -> None:
        """Count ``n`` more (zero changes nothing).

        Raises:
            ValueError: a name that is not in the table, a negative count, a label where there is
                none (or the other way round), or one that is not a short lower-case word.
        """
        with self._lock:
            known = self._counts.get(name, {})
            place = label if label in known and n >= 0 else self._place(name, n, label)
            if n:
                known[place] = known.get(place, 0) + n

    def add_all(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Add counts by name and label value; see ``add``, which would take twice as long."""
        with self._lock:
            for (name, label), n in counts.items():
                known = self._counts.get(name, {})
                place = label if label in known and n >= 0 else self._place(name, n, label)
                if n:
                    known[place] = known.get(place, 0) + n

    def _place(self, name: str, n: int, label: str) -> str:
        """Return the label value under which a new one is counted."""
        counter = self._table.get(name)
        if counter is None:
            raise ValueError(f"there is no counter {name!r}; add a metric that shows it")
        if n < 0:
            raise ValueError(f"counter {name} cannot fall by {-n}")
        if bool(label) != bool(counter.label):
            raise ValueError(f"counter {name} has label {counter.label!r}, got the value {label!r}")
        if _LABEL.fullmatch(label) is None:
            raise ValueError(f"counter {name}: {label!r} is not a short lower-case word")
        full = len(self._counts[name]) - len(counter.words) >= LABEL_VALUES_MAX
        return OTHER if full else label

    def get(self, name: str, label: str | None = None) -> int:
        """Return the count of one counter: of one label value, or (``None``) of all."""
        with self._lock:
            known = self._counts[name]
            return sum(known.values()) if label is None else known.get(label, 0)

    def values(self) -> dict[str, dict[str, int]]:
        """Return all counters by name and label value (empty for a counter without)."""
        with self._lock:
            return {name: dict(counts) for name, counts in self._counts.items()}

    def snapshot(self) -> dict[str, int]:
        """Return all counts by ``name`` or ``name{label value}``, labels that were seen only."""
        return {
            f"{name}{{{label}}}" if label else name: count
            for name, counts in sorted(self.values().items())
            for label, count in sorted(counts.items())
            if count or not label
        }


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


SLOW_S = 0.1
"""Time from which a call is reported by itself."""
_SLOW_KEPT = 64

SECONDS_BOUNDS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3),
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
)
"""Upper bounds of the buckets of a call's time."""

AGE_BOUNDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 86400.0)
"""Upper bounds of the buckets of a block's age."""


@dataclass
class Histogram:
    """Counts by bucket, the last one without a bound, and the sum of what was observed."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` (at its bound: in the bucket below) ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count each of ``values``, shape (n,)."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, found.tolist(), strict=True)]
        self.sum += float(values.sum())


class CallTimings:
    """Calls by method and by how they ended, and the lag of the loop that answers them.

    Bounded by the methods that are served: the caller passes none that a peer made up.
    """

    def __init__(self) -> None:
        self.ended: collections.Counter[tuple[str, str]] = collections.Counter()
        self.seconds: dict[str, Histogram] = {}
        self.loop_lag = Histogram(SECONDS_BOUNDS)
        self.slow: deque[tuple[str, str, float]] = deque(maxlen=_SLOW_KEPT)
        """Calls of at least ``SLOW_S`` that nobody has taken yet: method, code, seconds."""

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Count a call of ``method`` that ended as ``code`` after ``seconds``."""
        self.ended[method, code] += 1
        histogram = self.seconds.get(method)
        if histogram is None:
            histogram = self.seconds[method] = Histogram(SECONDS_BOUNDS)
        histogram.observe(seconds)
        if seconds >= SLOW_S:
            self.slow.append((method, code, seconds))


LAG_EVERY_S = 0.1
LAG_IDLE_S = 1.0


async def watch_lag(
    lag: Histogram,
    calls: Callable[[], int],
    every_s: float = LAG_EVERY_S,
    idle_s: float = LAG_IDLE_S,
) -> None:
    """Observe how late timers of the running loop fire.

    Args:
        lag: the seconds go there.
        calls: a number that changes with every call.
        every_s: pause between two timers while engines call.
        idle_s: pause while they do not: ten timers a second take half of an idle daemon's time.
    """
    loop, before = asyncio.get_running_loop(), calls()
    while True:
        idle = before == (before := calls())
        pause_s = idle_s if idle else every_s
        due = loop.time() + pause_s
        await asyncio.sleep(pause_s)
        lag.observe(max(0.0, loop.time() - due))


_SAMPLES_MAX = 4096


class TickClock:
    """Samples of (tick, seconds), noted about once a second; older samples are sparser.

    An age is too high by at most the time between two samples.
    """

    def __init__(self, now: float) -> None:
        self._ticks: I64 = np.zeros(_SAMPLES_MAX, np.int64)
        self._times = np.full(_SAMPLES_MAX, now)
        self._count = 1

    def note(self, tick: int, now: float) -> None:
        """Note that the logical time at ``now`` is ``tick``."""
        last = self._count - 1
        if tick < self._ticks[last]:  # it has wrapped
            self._count = 1
            last = 0
        elif tick > self._ticks[last]:
            if self._count == _SAMPLES_MAX:
                half = _SAMPLES_MAX // 2
                self._ticks[:half] = self._ticks[::2]
                self._times[:half] = self._times[::2]
                self._count = half
            last = self._count
            self._count += 1
        self._ticks[last], self._times[last] = tick, now

    def ages_s(self, ticks: U32, now: float) -> npt.NDArray[np.float64]:
        """Return the seconds since each tick; since the first sample for ticks before it."""
        known = self._ticks[: self._count]
        before = np.searchsorted(known, ticks.astype(np.int64)) - 1
        ages: npt.NDArray[np.float64] = np.maximum(now - self._times[np.maximum(before, 0)], 0.0)
        return ages
