"""``kvhearth bench remote-tier``: what the mover costs beside its driver in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.output import AsJson, console, row, say_json, table

EPILOG = (
    "Example: kvhearth bench remote-tier --json | tail -n 1 | "
    "jq '{stall_told_s, late_bytes, drivers, missed}'"
)


def remote_tier(
    as_json: AsJson = False,
    remote: Annotated[
        list[str] | None,
        typer.Option(
            "--remote",
            help="A further remote, as NAME=URL; repeatable. What is written there is removed.",
            metavar="NAME=URL",
            show_default=False,
        ),
    ] = None,
    valkey: Annotated[
        Path | None,
        typer.Option(
            "--valkey",
            help="Start this Valkey server for the run.",
            metavar="BINARY",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds of small blocks.")] = False,
) -> None:
    """Measure puts and gets of a remote's driver in a plain loop and through
    the mover, in turns, beside a raw socket; and a server that stalls.

    Starts a bucket with nothing behind it, so that the client's own cost is
    seen. Missing a target is not an error: `missed` names those figures.
    """
    from kvhearth_lab.bench.remote_tier.figures import (
        FULL,
        LOOKUP_FIGURES,
        QUICK,
        STALL_FIGURES,
        figures_of,
    )
    from kvhearth_lab.bench.remote_tier.run import run

    urls = dict(each.partition("=")[::2] for each in remote or [])
    if not all(urls.values()):
        raise KVHearthError(Reason.CONFIG_INVALID, "--remote has the form NAME=URL")
    found = {**run(QUICK if quick else FULL, urls, valkey), "quick": quick}
    if as_json:
        say_json(found)
        return
    shown = table("remote", "figure", "value", "target", "ok", "what", right=("value", "target"))
    for name, values in found["drivers"].items():
        for each in figures_of(name.rpartition("_")[0]):
            ok = {True: "yes", False: "NO", None: ""}[each.good(values[each.name])]
            row(shown, name, each.name, f"{values[each.name]:g}", each.target, ok, each.what)
    for each in (*LOOKUP_FIGURES, *STALL_FIGURES):
        ok = {True: "yes", False: "NO", None: ""}[each.good(found[each.name])]
        row(shown, "daemon", each.name, f"{found[each.name]:g}", each.target, ok, each.what)
    console().print(shown)
