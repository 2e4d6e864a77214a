"""Durations and outcomes of calls, counted where they are answered, and ages of blocks."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32

SLOW_S = 0.1
"""Time from which a call is reported by itself."""
_SLOW_KEPT = 64

SECONDS_BOUNDS = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    5.0,
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
        self.ended: Counter[tuple[str, str]] = Counter()
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
