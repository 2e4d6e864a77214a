"""`kvhearth hostile`: attacks beside a good client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from kvhearth_lab.cli import cleaned_up
from kvhearth_server.cli.output import AsJson, console, note, row, say_json, table

EPILOG = "Example: kvhearth hostile --seconds 600 --json | tail -n 1 | jq .missed"
EXIT_MISSED = 1
EXIT_UNTESTED = 2
_SECONDS = 120.0

Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        min=1,
        help="Measured time of all attacks together. Each attack has a least time, and starts "
        "and settling take more.",
    ),
]
Only = Annotated[
    str,
    typer.Option("--only", help="Attacks to run, separated by commas; 'list' lists them."),
]
Times = Annotated[
    bool,
    typer.Option(
        "--times/--no-times",
        help="Count times beyond their bounds as missed. A shared machine's own stalls are times.",
    ),
]


def hostile(
    *,
    seconds: Seconds = _SECONDS,
    only: Only = "",
    times: Times = True,
    as_json: AsJson = False,
) -> None:
    """Attack a daemon beside a good client of another tenant, and report what
    the good client and the daemon's resources suffer.

    Starts its own daemon. As root, attackers and the good client are
    different users. Exit code 1 if a bound is missed, 2 if no attack ran.
    """
    from kvhearth_lab.hostile.attack import table as attacks
    from kvhearth_lab.hostile.run import run

    if only == "list":
        _list(attacks())
        return
    names = [word.strip() for word in only.split(",") if word.strip()]
    with cleaned_up():
        found = run(seconds, names, note)
    for name, why in found["skipped"].items():
        note(f"{name}: skipped: {why}")
    for name, values in found["rows"].items():
        for text in [*values["failures"], *values["wrong"], *values["lost"]][:_SHOWN]:
            note(f"{name}: {text}")
    if as_json:
        say_json(found)
    else:
        console().print(shown(found))
    if set(found["missed"]) - (set() if times else set(found["late"])):
        raise typer.Exit(EXIT_MISSED)
    if not found["attacks"]:
        note("no attack ran")
        raise typer.Exit(EXIT_UNTESTED)


_SHOWN = 8


def shown(found: Mapping[str, Any]) -> Table:
    """Return a table with one row an attack."""
    numbers = ("idle", "under", "max", "factor", "rss", "left", "fds", "livez", "errors")
    made = table("attack", *numbers, "missed", right=numbers)
    for name, each in found["rows"].items():
        cells = (
            f"{each['idle']['p99_ms']:g} ms",
            f"{each['under']['p99_ms']:g} ms",
            f"{each['under']['max_ms']:g} ms",
            f"{each['factor']:g}",
            f"+{each['rss_growth_mib']:g} MiB",
            f"+{each['rss_left_mib']:g} MiB",
            f"+{each['descriptors_after'] - each['descriptors_before']}",
            f"{each['livez_s']:g} s",
            f"{sum(each['errors'].values())}",
        )
        row(made, name, *cells, ", ".join(each["missed"]))
    return made


def _list(attacks: Mapping[str, Any]) -> None:
    made = table("attack", "user", "needs", "what it does")
    for name, attack in attacks.items():
        row(made, name, attack.who, ", ".join(sorted(attack.needs)), attack.help)
    console().print(made)
