"""Decision between load and recompute, from this engine's measured costs over tokens."""

from __future__ import annotations

import enum
from dataclasses import dataclass

UNBOUNDED_TOKENS = 1 << 62
"""A bound in tokens where nobody gave one. 0 is a bound like any other: it means none at all."""
_DECAY = 0.97
_COUNT_MIN = 4
_TRY_EVERY = 64


class CostLine:
    """Seconds as a line over tokens, fitted to recent measurements; old ones fade.

    Pure. Both coefficients stay at 0 or above, so that the line can be extrapolated beyond the
    measurements.
    """

    def __init__(self, decay: float = _DECAY) -> None:
        self._decay = decay
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.count = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that ``tokens`` took ``seconds``."""
        keep, x = self._decay, float(tokens)
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + x
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * seconds
        self.count += 1

    def seconds(self, tokens: int) -> float:
        """Estimate the seconds for ``tokens``; 0 before any measurement."""
        fixed, slope = self._line()
        return fixed + slope * tokens

    def _line(self) -> tuple[float, float]:
        if not self._x:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        # Measurements of one size cannot separate a fixed part: attribute everything to the slope.
        slope = mean_y / mean_x
        if spread > 1e-3 * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


class Verdict(enum.StrEnum):
    """Decision about a hit."""

    LOAD = "load"
    TOO_SHORT = "too_short"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Bounds:
    """A user's bounds of one load in tokens; ``always`` switches the estimate off."""

    min_load_tokens: int = 0
    max_load_tokens: int = UNBOUNDED_TOKENS
    always: bool = False


class LoadPolicy:
    """Decides about each hit. Learns from loads, promotions from SSD and prefill steps.

    Until the rates are known, every hit is loaded, after a wait for promotion where it needs one.
    One in 64 hits that look slower than computing is loaded all the same, so that a rate that was
    once bad is measured again. Pure.

    Args:
        bounds: the user's bounds.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.load = CostLine()
        self.promotion = CostLine()
        self.prefill = CostLine()
        self._bounds = bounds
        self._refused_count = 0

    def most(self, asked: int = UNBOUNDED_TOKENS) -> int:
        """Return the most tokens that one load may bring; ``asked`` is a request's own bound."""
        return min(self._bounds.max_load_tokens, asked)

    def judge(self, tokens: int) -> Verdict:
        """Decide about a hit of ``tokens`` beyond those that the engine has."""
        if tokens < self._bounds.min_load_tokens:
            return Verdict.TOO_SHORT
        if self._bounds.always or not _known(self.load, self.prefill):
            return Verdict.LOAD
        if self.load.seconds(tokens) <= self.prefill.seconds(tokens):
            return Verdict.LOAD
        return Verdict.LOAD if self._retries() else Verdict.RECOMPUTE

    def prefetches(self, tokens: int) -> bool:
        """Whether to promote blocks from SSD for a request of ``tokens`` before the number of hits
        is known. True if a hit of all tokens would still be worth it.
        """
        if tokens < self._bounds.min_load_tokens:
            return False
        if self._bounds.always or not _known(self.load, self.promotion, self.prefill):
            return True
        up_s = self.promotion.seconds(tokens) + self.load.seconds(tokens)
        return up_s <= self.prefill.seconds(tokens) or self._retries()

    def awaits(self, ready: int, most: int, eta_s: float) -> bool:
        """Whether a request waits until ``most`` tokens beyond those that the engine has can be
        loaded, when ``ready`` of them can be loaded at once.

        Args:
            eta_s: the daemon's estimate for the others. This engine's own measurement counts where
                it is longer.
        """
        if most <= ready or most < self._bounds.min_load_tokens:
            return False
        if self._bounds.always or not _known(self.load, self.prefill):
            return True
        if _known(self.promotion):
            eta_s = max(eta_s, self.promotion.seconds(most - ready))
        now_s = self.prefill.seconds(most)
        if ready:
            now_s = min(now_s, self.load.seconds(ready) + self.prefill.seconds(most - ready))
        return eta_s + self.load.seconds(most) <= now_s or self._retries()

    def _retries(self) -> bool:
        """Whether to try a choice that looks too slow once more."""
        self._refused_count += 1
        return self._refused_count % _TRY_EVERY == 0


def _known(*lines: CostLine) -> bool:
    return min(line.count for line in lines) >= _COUNT_MIN
