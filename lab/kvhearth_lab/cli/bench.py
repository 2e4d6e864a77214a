"""``kvhearth bench``: benchmarks that start their own daemons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, console, draw_last, row, say_json, table
from kvhearth_server.config.value_types import parse_size

LOCAL_EPILOG = "Example: kvhearth bench local --json | jq '{store_ratio, load_ratio, missed}'"


def local(
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the figures, too.", metavar="FILE", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Half a minute instead of minutes, and more noise.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Most memory of one daemon (default: enough for a million blocks, 4.1GiB).",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure this machine's daemon and client against memcpy and an empty call, in one run.

    Starts its own daemons. Missing a target is not an error: `missed` names those figures.
    """
    from kvhearth_lab.bench.local import run as bench
    from kvhearth_lab.bench.local.plot import draw, require_plotter
    from kvhearth_lab.bench.local.sizes import sizes_of

    if plot is not None:
        require_plotter()
    sizes = sizes_of(quick=quick, memory_bytes=None if memory is None else _bytes(memory))
    found = {**bench.run(sizes), "quick": quick}
    if as_json:
        say_json(found)
    else:
        console().print(shown(found))
    draw_last(draw, found, plot)


def shown(found: Mapping[str, Any]) -> Table:
    """Return a table with one row a figure."""
    from kvhearth_lab.bench.local.figures import FIGURES

    made = table("figure", "value", "spread", "target", "ok", "what", right=("value", "target"))
    for each in FIGURES:
        value, spread = found.get(each.name), found["spread"].get(each.name)
        good = each.good(value)
        ok = "" if good is None else "yes" if good else "NO"
        around = "" if spread is None else f"{spread[0]:g} .. {spread[1]:g}"
        row(made, each.name, _text(value), around, each.target, ok, each.what)
    balanced = found["books"]["balanced"]
    row(made, "books", "", "", "balanced", "yes" if balanced else "NO", "recounted at the end")
    return made


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.6g}" if isinstance(value, int | float) else str(value)


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--memory: {error}") from None
