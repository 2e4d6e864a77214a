"""Plot of the figures of ``kvhearth bench local``, by matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.bench.local.figures import FIGURES

_TIMES = (
    "rpc_p50_us",
    "frame_p50_us",
    "lookup512_p50_us",
    "lookup512_p99_us",
    "lookup512_1m_p50_us",
    "lookup4096_p50_us",
    "memcpy_one_p50_us",
    "store_one_p50_us",
    "load_one_p50_us",
)
_RATIOS = (
    "store_ratio",
    "store_sealed_ratio",
    "load_ratio",
    "load_unverified_ratio",
    "first_touch_ratio",
)


def require_plotter() -> None:
    """Check for matplotlib before a run of minutes, not after it.

    Raises:
        KVHearthError: ``config_invalid``: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise KVHearthError(
            Reason.CONFIG_INVALID, "--plot needs matplotlib: pip install 'kvhearth[lab]'"
        )


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: ratios with their spread and targets, and times.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(picture)
    ratios, times = picture.subplots(1, 2)
    names = [name for name in _RATIOS if name in found]
    values = [found[name] for name in names]
    spread = [found["spread"][name] for name in names]
    errors = [
        [max(value - low, 0) for value, (low, _) in zip(values, spread, strict=True)],
        [max(high - value, 0) for value, (_, high) in zip(values, spread, strict=True)],
    ]
    ratios.barh(names, values, xerr=errors, color="tab:orange", ecolor="grey")
    bounds = {each.name: each.bound for each in FIGURES if each.sign}
    for place, name in enumerate(names):
        if name in bounds:
            ratios.plot([bounds[name]] * 2, [place - 0.4, place + 0.4], color="black")
    ratios.set_title("speed against memcpy (bar: target, whisker: spread)")
    names = [name for name in _TIMES if name in found]
    times.barh(names, [found[name] for name in names], color="tab:blue")
    times.set_title("microseconds")
    for axes in (ratios, times):
        axes.invert_yaxis()
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: {error}") from None
