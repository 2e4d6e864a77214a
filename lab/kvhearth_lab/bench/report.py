"""Reports of the benchmarks: figures with targets, statistics of samples, the machine, progress and
plots.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from kvhearth.errors import KVHearthError, Reason


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        name: key in the JSON object.
        what: description for a person.
        sign, bound: ``>=`` or ``<=`` a target; an empty sign stands for none.
    """

    name: str
    what: str
    sign: str = ""
    bound: float = 0.0

    def good(self, value: object) -> bool | None:
        """Whether ``value`` reaches the target; None without a target or without a value."""
        if not self.sign or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value >= self.bound if self.sign == ">=" else value <= self.bound

    @property
    def target(self) -> str:
        """The target as shown in the table."""
        return f"{self.sign} {self.bound:g}" if self.sign else ""


def missed(values: Mapping[str, Any], figures: Iterable[Figure]) -> list[str]:
    """Return the names of the figures that do not reach their target."""
    return [each.name for each in figures if each.good(values.get(each.name)) is False]


@dataclass
class Result:
    """Results of a run, filled part by part; ``spread`` has least and greatest round."""

    values: dict[str, Any] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)

    def put(self, name: str, samples: Sequence[float], digits: int = 3) -> None:
        """Record a median with its spread."""
        self.values[name] = round(p50(samples), digits)
        self.spread[name] = [round(min(samples), digits), round(max(samples), digits)]


# -- statistics ------------------------------------------------------------------------------------


def p50(samples: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile: the sample that at most a hundredth of all exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def median_of(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % interval, by order statistics, so for any
    distribution.
    """
    ordered, count = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(count)
    low = ordered[max(math.floor(count / 2 - reach), 0)]
    high = ordered[min(math.ceil(count / 2 + reach), count - 1)]
    return p50(ordered), low, high


def us(seconds: float) -> float:
    """Convert to microseconds, rounded to a tenth."""
    return round(seconds * 1e6, 1)


def ratio_of(baselines: Sequence[float], times: Sequence[float]) -> list[float]:
    """Divide baselines by times, round by round: 1 is as fast as the baseline, 0.5 half as fast."""
    return [base / time for base, time in zip(baselines, times, strict=True)]


# -- the run ---------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load1": round(os.getloadavg()[0], 2),
    }


def steps(count: int, what: str) -> Iterator[int]:
    """Yield ``range(count)`` behind a progress bar on stderr, shown only on a terminal."""
    shown = sys.stderr.isatty()
    console = Console(stderr=True)
    yield from track(range(count), what, console=console, transient=True, disable=not shown)


# -- plots -----------------------------------------------------------------------------------------


def require_plotter() -> None:
    """Check for matplotlib before a run of minutes, not after it.

    Raises:
        KVHearthError: ``config_invalid``: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise KVHearthError(
            Reason.CONFIG_INVALID, "--plot needs matplotlib: pip install 'kvhearth[lab]'"
        )


@contextlib.contextmanager
def picture(path: Path, width: float, height: float, **grid: Any) -> Iterator[Any]:
    """Provide matplotlib's axes to draw on, and write the file at the end.

    Args:
        path: the file; its ending decides on the format.
        width, height: in inches.
        grid: arguments of ``matplotlib.figure.Figure.subplots``; two axes by default.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be written.
    """
    from matplotlib import figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = figure.Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    yield made.subplots(**{"nrows": 1, "ncols": 2, **grid})
    try:
        made.savefig(path)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: {error}") from None


def whiskers(
    values: Sequence[float], spread: Sequence[Sequence[float]]
) -> tuple[list[float], list[float]]:
    """Return how far each (low, high) of ``spread`` reaches below and above its value."""
    low = [max(value - low, 0) for value, (low, _) in zip(values, spread, strict=True)]
    high = [max(high - value, 0) for value, (_, high) in zip(values, spread, strict=True)]
    return low, high
