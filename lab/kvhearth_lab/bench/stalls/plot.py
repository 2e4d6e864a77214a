"""Plot of a run of ``kvhearth bench stalls``, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.bench.stalls.figures import CALL_MS_MAX, PARTS


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: the longest call and the timer's lateness of each part.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(picture)
    calls, timers = picture.subplots(1, 2)
    calls.barh(PARTS, [found[name] for name in PARTS], color="tab:orange")
    calls.axvline(CALL_MS_MAX, color="black")
    calls.set_title("longest call, CPU milliseconds (line: target)")
    timers.barh(PARTS, [found["timer_late_ms"][name] for name in PARTS], color="tab:blue")
    timers.set_title("greatest lateness of a timer of 1 ms, milliseconds")
    for axes in (calls, timers):
        axes.invert_yaxis()
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: {error}") from None
