"""Plot of a run of ``kvhearth bench ttft``, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason

_BARS = (
    ("none", "cold", "computed", "tab:grey"),
    ("none", "engine_warm", "engine's own memory", "tab:green"),
    ("kvhearth", "warm", "KVHearth", "tab:orange"),
    ("kvhearth", "restart", "KVHearth, engine restarted", "tab:red"),
    ("lmcache", "warm", "LMCache", "tab:blue"),
    ("lmcache", "restart", "LMCache, engine restarted", "tab:cyan"),
)
_ZERO_HIT = "zero_hit_overhead"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: TTFT by prompt length, and the overhead without a hit.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(found["sizes"]["prompt_tokens"])
    picture = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(picture)
    times, costs = picture.subplots(1, 2, width_ratios=(3, 1))
    known = [bar for bar in _BARS if bar[1] in found["sides"].get(bar[0], {})]
    for place, (side, state, title, colour) in enumerate(known):
        values = found["sides"][side][state]
        at = [labels.index(label) + (place + 0.5) / (len(known) + 1) for label in values]
        middle = [value[0] for value in values.values()]
        low = [value[0] - value[1] for value in values.values()]
        high = [value[2] - value[0] for value in values.values()]
        width = 0.9 / (len(known) + 1)
        times.bar(at, middle, width, yerr=[low, high], color=colour, label=title, ecolor="black")
    times.set_yscale("log")
    times.set_xticks([place + 0.4 for place in range(len(labels))], labels)
    times.set_title(f"seconds to the first token, {found['sizes']['model']} model")
    times.legend()
    names = [name for name in (_ZERO_HIT, f"peer_{_ZERO_HIT}") if name in found]
    shown = [100 * found[name] for name in names]
    reach = [[100 * edge for edge in found[f"{name}_interval"]] for name in names]
    errors = [
        [max(value - low, 0) for value, (low, _) in zip(shown, reach, strict=True)],
        [max(high - value, 0) for value, (_, high) in zip(shown, reach, strict=True)],
    ]
    costs.bar(["LMCache" if "peer" in name else "KVHearth" for name in names], shown, yerr=errors)
    costs.axhline(2.0, color="black")
    costs.set_title("% more CPU time without a hit\n(line: target, whisker: 95 %)")
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: {error}") from None
