"""``kvhearth doctor``: checks whether this machine is ready, and names the line that fixes it."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvhearth_server.cli.app import exit_code
from kvhearth_server.cli.doctor.checks import examine
from kvhearth_server.cli.doctor.finding import Finding, Grade, Look
from kvhearth_server.cli.doctor.machine import Machine
from kvhearth_server.cli.output import AsJson, console, say_json, waiting
from kvhearth_server.cli.serve import given, with_flags_of
from kvhearth_server.config.load import Settings, load_settings

EPILOG = "Example: kvhearth doctor --memory 64GiB --arena-dir /dev/hugepages/kvhearth"
_COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}


@with_flags_of(Settings)
def doctor(
    config: Path | None = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Directory whose drive is checked, with direct I/O, if ssd_dirs is not set. "
            "Default: the temporary directory.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    **flags: object,
) -> None:
    """Check whether kvhearth serve starts here with the same flags, environment
    and file.

    Each finding that is not ok names the command that fixes it. The last line
    is the verdict. The exit code is the one that kvhearth serve would end with,
    0 if it would serve. Run it as the daemon's user while the daemon is
    stopped, because a running one holds its memory and sockets.
    """
    settings = load_settings(given(flags), config)
    with waiting("looking"):
        found, error = examine(Look(Machine(), settings, folder or _temporary()))
    failed = [finding for finding in found if finding.grade is Grade.FAIL]
    code = exit_code(error) if error is not None else int(bool(failed))
    verdict = "ready: kvhearth serve starts with these settings"
    if failed:
        why = error.message if error is not None else f"{failed[0].check}: {failed[0].found}"
        verdict = f"not ready, kvhearth serve would end with {code}: {why}"
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in found]
        report = {"ready": not failed, "exit_code": code, "verdict": verdict}
        say_json({**report, "findings": findings})
    else:
        _print(found)
        console().print(escape(verdict), soft_wrap=True)
    if code:
        raise typer.Exit(code)


def _temporary() -> Path:
    """Return the temporary directory; /tmp where no directory is writable, as on a read-only
    root.
    """
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
