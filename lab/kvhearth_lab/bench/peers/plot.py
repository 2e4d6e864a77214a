"""Plot of the figures of ``kvhearth bench peers``, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.bench.peers.figures import BATCHES, FIRST_STORE, LOOKUP, ONES


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: a row a peer, on the left batches against memcpy, on the right times.

    Raises:
        KVHearthError: ``config_invalid``: there is nothing to draw, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    peers = found["peers"]
    if not peers:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: no peer was measured")
    picture = Figure(figsize=(12, 4 * len(peers)), layout="constrained")
    FigureCanvasAgg(picture)
    rows = picture.subplots(len(peers), 2, squeeze=False)
    ratios = [f"{name}_ratio" for name in (*BATCHES, FIRST_STORE)]
    times = [f"{name}_p50_us" for name in (*ONES, LOOKUP)]
    for (name, pair), (left, right) in zip(peers.items(), rows, strict=True):
        for axes, figures in ((left, ratios), (right, times)):
            known = [each for each in figures if each in pair["ours"] or each in pair["peer"]]
            for place, (side, colour) in enumerate((("ours", "tab:orange"), ("peer", "tab:blue"))):
                heights = [at + (place - 0.5) * 0.4 for at in range(len(known))]
                values = [pair[side].get(each, 0) for each in known]
                label = "kvhearth" if side == "ours" else name
                axes.barh(heights, values, height=0.38, color=colour, label=label)
            axes.set_yticks(range(len(known)), known)
            axes.invert_yaxis()
            axes.legend()
        left.set_title(f"{name}: speed of 128 x 2 MiB against memcpy")
        right.set_title(f"{name}: microseconds, p50")
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: {error}") from None
