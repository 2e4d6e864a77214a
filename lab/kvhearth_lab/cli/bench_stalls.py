"""``kvhearth bench stalls``: how long the daemon's loop is blocked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvhearth_server.cli.output import AsJson, console, draw_last, row, say_json, table

EPILOG = "Example: kvhearth bench stalls --json | tail -n 1 | jq '{longest_call_cpu_ms, missed}'"


def stalls(
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the figures, too.", metavar="FILE", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Half a minute instead of minutes, with few blocks.")
    ] = False,
) -> None:
    """Measure the longest call of a daemon's loop in processor time while real clients use it.

    Starts its own daemons, with blocks of 64 bytes, and takes up to 4 GiB of memory. Missing a
    target is not an error: `missed` names those figures.
    """
    from kvhearth_lab.bench.local.plot import require_plotter
    from kvhearth_lab.bench.stalls.plot import draw
    from kvhearth_lab.bench.stalls.run import run
    from kvhearth_lab.bench.stalls.sizes import FULL, QUICK

    if plot is not None:
        require_plotter()
    found = {**run(QUICK if quick else FULL), "quick": quick}
    if as_json:
        say_json(found)
    else:
        console().print(shown(found))
    draw_last(draw, found, plot)


def shown(found: Mapping[str, Any]) -> Table:
    """Return a table with one row a figure."""
    from kvhearth_lab.bench.stalls.figures import FIGURES

    made = table("figure", "ms", "target", "ok", "in", "what", right=("ms", "target"))
    for each in FIGURES:
        good = each.good(found[each.name])
        ok = "" if good is None else "yes" if good else "NO"
        call = found["calls"].get(each.name, "")
        row(made, each.name, f"{found[each.name]:g}", each.target, ok, call, each.what)
    balanced = found["books"]["balanced"]
    row(made, "books", "", "balanced", "yes" if balanced else "NO", "", "recounted at the end")
    return made
