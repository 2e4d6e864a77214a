"""Plot of a run of ``kvhearth bench ssd``, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason

_KINDS = ("write", "read", "mixed")
_COLOURS = {"raw": "tab:grey", "kvhearth": "tab:orange", "lmcache": "tab:blue", "vllm": "tab:green"}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: GB/s and processor time, raw, ours, and peers' if there are any.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(picture)
    speeds, costs = picture.subplots(1, 2)
    _bars(speeds, found, "gbs", _KINDS)
    speeds.set_title("GB/s at 2 MiB (whisker: spread)")
    _bars(costs, found, "cpu_s_per_gb", _KINDS[:2])
    costs.axhline(0.1, color="black")
    costs.set_title("processor seconds a GB (line: target)\nours verifies every byte, peers do not")
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: {error}") from None


def _bars(axes: Any, found: Mapping[str, Any], unit: str, kinds: tuple[str, ...]) -> None:
    sides = {"raw": (found, "raw_"), "kvhearth": (found, "")}
    sides |= {name: (peer, "") for name, peer in found["peers"].items()}
    width = 0.9 / len(sides)
    for place, (side, (values, prefix)) in enumerate(sides.items()):
        names = [f"{prefix}{kind}_{unit}" for kind in kinds]
        known = [(at, name) for at, name in enumerate(names) if name in values]
        middle = [values[name] for _, name in known]
        spread = [values["spread"][name] for _, name in known]
        errors = [
            [max(value - low, 0) for value, (low, _) in zip(middle, spread, strict=True)],
            [max(high - value, 0) for value, (_, high) in zip(middle, spread, strict=True)],
        ]
        at = [index + place * width for index, _ in known]
        axes.bar(at, middle, width, yerr=errors, color=_COLOURS[side], label=side, ecolor="black")
    axes.set_xticks([index + 0.4 for index in range(len(kinds))], kinds)
    axes.legend()
