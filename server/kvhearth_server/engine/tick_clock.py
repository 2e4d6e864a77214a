"""Converts the core's logical time into ages in seconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32

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
        """Return the seconds since each tick; for tick 0 and ticks before the samples, since the
        first sample.
        """
        known = self._ticks[: self._count]
        before = np.searchsorted(known, ticks.astype(np.int64)) - 1
        ages: npt.NDArray[np.float64] = np.maximum(now - self._times[np.maximum(before, 0)], 0.0)
        return ages
