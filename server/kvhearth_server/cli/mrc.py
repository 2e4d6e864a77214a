"""``kvhearth mrc``: what more memory, or a larger SSD tier, would bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    note,
    percent,
    plain,
    row,
    say_json,
    size,
    table,
)

EPILOG = "Example: kvhearth mrc --plot; kvhearth mrc --json | jq '.curves[0].memory'"
FEW_KEYS = 10_000
"""Keys looked up below which the curve says little."""
GAIN_LEAST = 0.02
"""Rise of the hit ratio from which more memory is recommended."""
PLOT_ROWS, PLOT_COLUMNS = 12, 60

Point = tuple[float, float]
"""Bytes, and the hit ratio of that capacity."""


def mrc(
    socket_dir: SocketDir = None,
    namespace: Annotated[
        str, typer.Option("--namespace", help="Only of namespaces that start with these digits.")
    ] = "",
    plot: Annotated[bool, typer.Option("--plot", help="Draw the curve, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the hit ratio at 0.5, 1, 2 and 4 times the present memory and SSD.

    An estimate for the lookups of the last hour or so, as an LRU cache would
    have served them, from a sample of the keys (SHARDS). Keys that nobody
    asked for before are misses at every size.
    """
    with AdminClient(socket_dir) as daemon:
        found = daemon.stats()
    curves = [
        each
        for each in found.curves
        if not namespace or each.namespace.startswith(namespace.lower())
    ]
    if namespace and not curves:
        known = ", ".join(each.namespace for each in found.curves) or "none"
        raise KVHearthError(
            Reason.UNKNOWN_NAMESPACE, f"no curve of a namespace {namespace!r}; there are: {known}"
        )
    if as_json:
        say_json({"boot_id": found.boot_id, "curves": [plain(each) for each in curves]})
        return
    if not found.curves:
        note("the daemon keeps no curve: it was started with curve_keys 0")
        return
    if not any(each.asked_keys for each in curves):
        note("nobody has looked anything up yet")
        return
    _print(curves, plot=plot)


def _print(curves: Sequence[admin_pb2.MissRatioCurve], *, plot: bool) -> None:
    out = console()
    for ssd in (False, True):
        rows = [(each, each.ssd if ssd else each.memory) for each in curves if each.asked_keys]
        rows = [(each, ratios) for each, ratios in rows if ratios]
        if not rows:
            continue
        heads = [f"{ratio.factor:g} x" for ratio in rows[0][1]]
        what = "SSD with the present memory" if ssd else "memory alone"
        shown = table("tenant", "namespace", "keys asked", *heads, right=("keys asked", *heads))
        for each, ratios in rows:
            cells = [percent(ratio.hit_ratio, 1) for ratio in ratios]
            row(shown, each.tenant, each.namespace, str(each.asked_keys), *cells)
        now = size(rows[0][0].ssd_bytes if ssd else rows[0][0].memory_bytes)
        out.print(f"Hit ratio by {what} (1 x: {now})")
        out.print(shown)
        out.print()
    for each in curves:
        if each.points and each.asked_keys:
            if plot:
                lines = plot_lines([(p.bytes, p.hit_ratio) for p in each.points], each.memory_bytes)
                out.print(f"tenant {each.tenant}: hit ratio by capacity")
                out.print("\n".join(lines), markup=False)
                out.print()
            typer.echo(verdict(each))


def verdict(curve: admin_pb2.MissRatioCurve) -> str:
    """Return a sentence that says whether more memory would help."""
    about = f"tenant {curve.tenant}: {curve.sampled_keys} keys tracked"
    if curve.asked_keys < FEW_KEYS:
        return f"{about}; only {curve.asked_keys} keys asked so far, too few to trust the figures"
    by_factor = {each.factor: each for each in curve.memory}
    gain = by_factor[2.0].hit_ratio - by_factor[1.0].hit_ratio
    more, loss = size(by_factor[2.0].bytes), by_factor[1.0].hit_ratio - by_factor[0.5].hit_ratio
    if gain >= GAIN_LEAST:
        return f"{about}; {more} of memory would raise the hit ratio by {100 * gain:.1f} points"
    if loss < GAIN_LEAST:
        less = size(by_factor[0.5].bytes)
        return f"{about}; memory is ample: {less} would lose {100 * max(0.0, loss):.1f} points"
    return f"{about}; memory is enough: {more} would bring {100 * max(0.0, gain):.1f} points"


def plot_lines(
    points: Sequence[Point],
    present_bytes: float,
    marks: str = "*",
    others: Sequence[Sequence[Point]] = (),
) -> list[str]:
    """Draw hit ratios over capacities (logarithmic) as lines of text.

    Args:
        points: in ascending order of bytes, at least one.
        present_bytes: a capacity that is marked by a line; 0: none.
        marks: a character for ``points``, and one for each of ``others``.
        others: more curves.
    """
    curves = [points, *others]
    low = math.log(min(curve[0][0] for curve in curves))
    high = max(low + 1e-9, math.log(max(curve[-1][0] for curve in curves)))
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS + 1)]

    def column(size_bytes: float) -> int:
        part = (math.log(max(size_bytes, 1)) - low) / (high - low)
        return min(PLOT_COLUMNS - 1, max(0, round(part * (PLOT_COLUMNS - 1))))

    if present_bytes:
        for line in grid:
            line[column(present_bytes)] = ":"
    for mark, curve in reversed([*zip(marks, curves, strict=True)]):
        for place in range(PLOT_COLUMNS):
            at = math.exp(low + (high - low) * place / (PLOT_COLUMNS - 1))
            grid[round((1 - _at(curve, at)) * PLOT_ROWS)][place] = mark
    labels = {0: "100 %", PLOT_ROWS // 2: " 50 %", PLOT_ROWS: "  0 %"}
    lines = [f"{labels.get(n, ''):>5} |{''.join(line).rstrip()}" for n, line in enumerate(grid)]
    left, right = size(round(math.exp(low))), size(round(math.exp(high)))
    lines.append(f"      +{'-' * PLOT_COLUMNS}")
    lines.append(f"       {left}{right:>{PLOT_COLUMNS - len(left)}}")
    if present_bytes:
        lines.append(f"       : {size(round(present_bytes))}, the present memory")
    return lines


def _at(curve: Sequence[Point], size_bytes: float) -> float:
    """Return the hit ratio of a capacity, between two points in a straight line."""
    before = curve[0]
    for point in curve:
        if point[0] >= size_bytes:
            if point[0] == before[0]:
                return point[1]
            part = (size_bytes - before[0]) / (point[0] - before[0])
            return before[1] + part * (point[1] - before[1])
        before = point
    return before[1]
