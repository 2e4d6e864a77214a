"""Computation of a pair's figures from its samples, and their plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.bench.report import p50, p99, picture, ratio_of, us

BATCHES = ("store", "store_bare", "load", "load_bare", "load_unverified", "first_touch")
ONES = ("store_one", "store_one_bare", "load_one", "load_one_bare", "load_one_unverified")
"""Measures of single blocks that a side may have. ``bare``: the peer's protocol with plain copies,
without the work that its own client adds. ``unverified``: without the comparison of checksums,
which only KVHearth has.
"""
FIRST_STORE = "first_store"
"""The first store into a daemon that was just started: one sample."""
LOOKUP = "lookup512"


@dataclass
class Samples:
    """Measurements of one side.

    Attributes:
        baselines, seconds: by measure, round by round: a plain copy of as many bytes right before,
            and the measurement itself.
        lookups: seconds of each lookup.
        compared_bytes: number of loaded bytes that were compared with those stored.
    """

    baselines: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    lookups: list[float] = field(default_factory=list)
    compared_bytes: int = 0

    def add(self, measure: str, baseline: float, seconds: float) -> None:
        """Record one measurement."""
        self.baselines.setdefault(measure, []).append(baseline)
        self.seconds.setdefault(measure, []).append(seconds)

    def figures(self, batch_bytes: int) -> dict[str, Any]:
        """Return figures by name. ``*_ratio`` of a batch is its speed against memcpy; 1 is as fast.
        ``*_ratio`` of a single block is its time against memcpy, as in ``kvhearth bench local``.
        """
        made: dict[str, Any] = {"compared_bytes": self.compared_bytes}
        spread: dict[str, list[float]] = {}
        for name in (*BATCHES, FIRST_STORE):
            if name in self.seconds:
                ratios = ratio_of(self.baselines[name], self.seconds[name])
                made[f"{name}_ratio"] = round(p50(ratios), 3)
                made[f"{name}_gbs"] = round(batch_bytes / p50(self.seconds[name]) / 1e9, 2)
                spread[f"{name}_ratio"] = [round(min(ratios), 3), round(max(ratios), 3)]
        for name in ONES:
            if name in self.seconds:
                times = self.seconds[name]
                made[f"{name}_p50_us"] = us(p50(times))
                made[f"{name}_ratio"] = round(p50(times) / p50(self.baselines[name]), 2)
                spread[f"{name}_p50_us"] = [us(min(times)), us(p99(times))]
        if self.lookups:
            made[f"{LOOKUP}_p50_us"] = us(p50(self.lookups))
            made[f"{LOOKUP}_p99_us"] = us(p99(self.lookups))
            spread[f"{LOOKUP}_p50_us"] = [us(min(self.lookups)), us(p99(self.lookups))]
        return {**made, "spread": spread}


def counterpart(measure: str) -> str:
    """Return the measure of ours that a peer's measure is compared with: the default way to do the
    same.
    """
    return measure.removesuffix("_bare").removesuffix("_unverified")


def against(ours: Samples, peer: Samples) -> dict[str, float]:
    """Return, by measure of the peer, its time over ours, as the median over rounds; 2 means that
    ours takes half as long.
    """
    made: dict[str, float] = {}
    for name, times in peer.seconds.items():
        own = ours.seconds.get(counterpart(name), [])
        rounds = [theirs / mine for theirs, mine in zip(times, own, strict=False)]
        if rounds:
            made[name] = round(p50(rounds), 2)
    if ours.lookups and peer.lookups:
        made[LOOKUP] = round(p50(peer.lookups) / p50(ours.lookups), 2)
    return made


def figure_names(found: Mapping[str, Any]) -> list[str]:
    """Return the figures of a pair that either side has, in the order of the table."""
    wanted = [f"{name}_ratio" for name in (*BATCHES, FIRST_STORE)]
    for name in ONES:
        wanted += [f"{name}_p50_us", f"{name}_ratio"]
    wanted += [f"{LOOKUP}_p50_us", f"{LOOKUP}_p99_us"]
    return [name for name in wanted if name in found["ours"] or name in found["peer"]]


def baselines_of(contenders: Sequence[Samples], measures: Sequence[str]) -> list[float]:
    """Return all plain copies beside these measures."""
    return [
        seconds
        for side in contenders
        for name in measures
        for seconds in side.baselines.get(name, [])
    ]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: a row a peer, on the left batches against memcpy, on the right times.

    Raises:
        KVHearthError: ``config_invalid``: there is nothing to draw, or the file cannot be written.
    """
    peers = found["peers"]
    if not peers:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--plot {path}: no peer was measured")
    ratios = [f"{name}_ratio" for name in (*BATCHES, FIRST_STORE)]
    times = [f"{name}_p50_us" for name in (*ONES, LOOKUP)]
    with picture(path, 12, 4 * len(peers), nrows=len(peers), squeeze=False) as rows:
        for (name, pair), (left, right) in zip(peers.items(), rows, strict=True):
            for axes, figures in ((left, ratios), (right, times)):
                known = [each for each in figures if each in pair["ours"] or each in pair["peer"]]
                for place, (side, colour) in enumerate(
                    (("ours", "tab:orange"), ("peer", "tab:blue"))
                ):
                    heights = [at + (place - 0.5) * 0.4 for at in range(len(known))]
                    values = [pair[side].get(each, 0) for each in known]
                    label = "kvhearth" if side == "ours" else name
                    axes.barh(heights, values, height=0.38, color=colour, label=label)
                axes.set_yticks(range(len(known)), known)
                axes.invert_yaxis()
                axes.legend()
            left.set_title(f"{name}: speed of 128 x 2 MiB against memcpy")
            right.set_title(f"{name}: microseconds, p50")
