"""``kvhearth bench ssd``: the SSD tier against its own drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvhearth_server.cli.output import AsJson, console, draw_last, row, say_json, table
from kvhearth_server.cli.signals import cleaned_up

EPILOG = (
    "Example: kvhearth bench ssd --dir /mnt/nvme --json | tail -n 1 | "
    "jq '{write_ratio, read_ratio, missed}'"
)
_WIDTH = 160


def ssd(
    *,
    folder: Annotated[
        Path,
        typer.Option("--dir", help="Folder on the drive to measure; used and left empty."),
    ] = Path(),
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the figures, too.", metavar="FILE", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Half a minute instead of minutes, and more noise.")
    ] = False,
    interface: Annotated[
        str, typer.Option("--interface", help="auto, io_uring, libaio or threads.")
    ] = "auto",
    depth: Annotated[
        int, typer.Option("--depth", help="Requests in the kernel at once.", min=1, max=4096)
    ] = 32,
    lmcache: Annotated[
        Path | None,
        typer.Option(
            "--lmcache",
            help="Python of an environment with lmcache: its fs_native beside ours.",
            metavar="PYTHON",
            show_default=False,
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            "--vllm",
            help="Python of an environment with vllm: its filesystem tier beside ours.",
            metavar="PYTHON",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure the SSD tier against its own drive, through the same kernel interface, in one run.

    Uses no running daemon and up to 5 GiB of the drive. Missing a target is not an error: `missed`
    names those figures. Nor is a peer that cannot be measured.
    """
    from kvhearth_lab.bench.local.plot import require_plotter
    from kvhearth_lab.bench.ssd.peers import LMCACHE, VLLM
    from kvhearth_lab.bench.ssd.plot import draw
    from kvhearth_lab.bench.ssd.run import run
    from kvhearth_lab.bench.ssd.sizes import FULL, QUICK

    if plot is not None:
        require_plotter()
    peers = {LMCACHE: lmcache, VLLM: vllm}
    sizes = replace(QUICK if quick else FULL, depth=depth)
    with cleaned_up():
        found = {**run(folder, sizes, interface, peers), "depth": depth, "quick": quick}
    # With --json, stdout holds only the object; the table goes to stderr for a person.
    to = Console(stderr=True, width=_WIDTH, highlight=False) if as_json else console()
    for each in shown(found):
        to.print(each)
    if as_json:
        say_json(found)
    draw_last(draw, found, plot)


def shown(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the figures, then the peers, then the skipped parts."""
    from kvhearth_lab.bench.ssd.figures import FIGURES

    made = table("figure", "value", "spread", "target", "ok", "what", right=("value", "target"))
    made.title = f"{found['interface']}, slots in pages of {found['pages']}"
    made.title_justify = "left"
    for each in FIGURES:
        value = found.get(each.name)
        good = each.good(value)
        ok = "" if good is None else "yes" if good else "NO"
        row(made, each.name, _text(value), _around(found, each.name), each.target, ok, each.what)
    yield made
    if found["peers"]:
        yield _beside(found["peers"])
    if found["skipped"]:
        left_out = table("skipped", "why")
        for name, reason in found["skipped"].items():
            row(left_out, name, reason)
        yield left_out


def _beside(peers: Mapping[str, Any]) -> Table:
    names = list(next(iter(peers.values()))["spread"])
    heads = [head for name in peers for head in (name, "spread")]
    made = table("figure", *heads, right=tuple(peers))
    for name in names:
        cells = [c for peer in peers.values() for c in (_text(peer.get(name)), _around(peer, name))]
        row(made, name, *cells)
    return made


def _around(found: Mapping[str, Any], name: str) -> str:
    spread = found["spread"].get(name)
    return "" if spread is None else f"{spread[0]:g} .. {spread[1]:g}"


def _text(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) else "-"
