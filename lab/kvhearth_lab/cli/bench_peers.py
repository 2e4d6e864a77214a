"""``kvhearth bench peers``: other caches and KVHearth on this machine, in one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, console, draw_last, note, row, say_json, table
from kvhearth_server.config.value_types import parse_size

EPILOG = (
    "Example: kvhearth bench peers --lmcache /opt/lmcache/bin/python --json | tail -n 1 | jq .peers"
)
_WIDTH = 160


def peers(
    *,
    lmcache: Annotated[
        Path | None,
        typer.Option(
            "--lmcache",
            help="Python of an environment with lmcache.",
            metavar="PYTHON",
            show_default=False,
        ),
    ] = None,
    mooncake: Annotated[
        Path | None,
        typer.Option(
            "--mooncake",
            help="Python of an environment with mooncake-transfer-engine-non-cuda.",
            metavar="PYTHON",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the figures, too.", metavar="FILE", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, and more noise.")] = False,
    no_hugepages: Annotated[
        bool, typer.Option("--no-hugepages", help="Nobody uses 2 MiB pages, also if some are free.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Most memory of one daemon, ours or a peer's (default: 1GiB).",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure other caches and KVHearth in turns, in the sizes of `kvhearth bench local`.

    Starts its own daemons. A peer that cannot be measured is not an error: `skipped` gives the
    reason.
    """
    from kvhearth_lab.bench.local.plot import require_plotter
    from kvhearth_lab.bench.local.sizes import sizes_of
    from kvhearth_lab.bench.peers import run as pairs
    from kvhearth_lab.bench.peers.plot import draw

    if plot is not None:
        require_plotter()
    sizes = sizes_of(quick=quick, memory_bytes=None if memory is None else _bytes(memory))
    given = dict(zip(pairs.PEERS, (lmcache, mooncake), strict=True))
    found = {**pairs.run(sizes, given, note, hugepages=not no_hugepages), "quick": quick}
    # With --json, stdout holds only the object; the table goes to stderr for a person.
    to = Console(stderr=True, width=_WIDTH, highlight=False) if as_json else console()
    for each in shown(found):
        to.print(each)
    if as_json:
        say_json(found)
    draw_last(draw, found, plot)


def shown(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yield one table a peer, and one of the skipped peers and parts."""
    from kvhearth_lab.bench.peers.figures import figure_names

    for name, pair in found["peers"].items():
        if not figure_names(pair):
            continue
        made = table(
            "figure", "ours", "spread", name, "spread", "theirs / ours", right=("ours", name)
        )
        made.title = f"{name} {pair.get('versions', {}).get(name, '')}"
        made.title_justify = "left"
        for figure in figure_names(pair):
            cells = []
            for side in ("ours", "peer"):
                spread = pair[side]["spread"].get(figure)
                cells += [
                    _text(pair[side].get(figure)),
                    "" if spread is None else f"{spread[0]:g} .. {spread[1]:g}",
                ]
            row(made, figure, *cells, _times(pair, figure))
        yield made
    if found["skipped"]:
        made = table("skipped", "why")
        for name, reason in found["skipped"].items():
            row(made, name, reason)
        yield made


def _times(pair: Mapping[str, Any], figure: str) -> str:
    """Return the peer's time over ours as text; empty in ratio rows of single blocks."""
    measure = figure.removesuffix("_p50_us").removesuffix("_ratio")
    if "_one" in measure and figure.endswith("_ratio"):
        return ""  # shown in the row of the time
    value = pair["against"].get(measure)
    return "" if value is None else f"{value:g}"


def _text(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) else "-"


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--memory: {error}") from None
