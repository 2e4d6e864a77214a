"""``kvhearth doctor``: is this machine ready, and which line fixes what is not?"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvhearth_server.cli.checks import examine
from kvhearth_server.cli.findings import Finding, Grade, Look
from kvhearth_server.cli.options import AsJson, Config
from kvhearth_server.cli.output import console, say_json, waiting
from kvhearth_server.cli.probes import Machine
from kvhearth_server.config import load_settings

EPILOG = "Example: kvhearth doctor --memory 64GiB --dir /var/lib/kvhearth"
_COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}


def doctor(
    config: Config = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Look for so much. Default: as the settings say.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Without ssd_dirs: try direct IO there, and look at its drive. Default: the "
            "temporary directory.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine for a daemon with the settings of environment and file.

    Each finding that is not ok comes with the line that fixes it. Exits with 1 if one of them
    keeps the daemon from starting. Run it as the daemon's user, before the daemon has its memory.
    """
    settings = load_settings({} if memory is None else {"memory": memory}, config)
    with waiting("looking"):
        found = examine(Look(Machine(), settings, folder or _temporary()))
    bad = any(finding.grade is Grade.FAIL for finding in found)
    if as_json:
        say_json({"ready": not bad, "findings": [dataclasses.asdict(finding) for finding in found]})
    else:
        _print(found)
    if bad:
        raise typer.Exit(1)


def _temporary() -> Path:
    """The temporary directory; /tmp where no directory is writable, as on a read-only root."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")


def _print(found: list[Finding]) -> None:
    out = console()
    width = max(len(finding.check) for finding in found)
    for finding in found:
        grade = f"[{_COLOURS[finding.grade]}]{finding.grade:4}[/]"
        out.print(f"{grade}  {finding.check:{width}}  {escape(finding.found)}")
        if finding.fix:
            out.print(f"{'':{width + 8}}{escape(finding.fix)}")
