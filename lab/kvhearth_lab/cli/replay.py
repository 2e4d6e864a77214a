"""`kvhearth trace replay`: a recorded trace against a live daemon."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.cli import cleaned_up
from kvhearth_server.cli.admin_client import directory
from kvhearth_server.cli.output import AsJson, SocketDir, note, percent, progress, say_json, size
from kvhearth_server.config.value_types import parse_size

EPILOG = "Example: kvhearth trace replay day.trace --speed 10 --page-bytes 64KiB"
EXIT_WRONG = 1
_DEADLINES = "lookup_ms=5000&call_ms=10000"
"""A replay as fast as possible fills the daemon's queues; that is no reason to miss."""


def replay(
    file: Annotated[Path, typer.Argument(help="The trace.", metavar="FILE")],
    socket_dir: SocketDir = None,
    url: Annotated[
        str,
        typer.Option("--url", help="URL of the daemon. Default: the one of the socket directory."),
    ] = "",
    speed: Annotated[
        float,
        typer.Option("--speed", min=0, help="Pace, 1 as it was recorded; 0: as fast as possible."),
    ] = 0.0,
    page_bytes: Annotated[
        str,
        typer.Option(
            "--page-bytes",
            help="Size of a block, to replay on less memory. Default: the recorded one.",
            metavar="SIZE",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Replay a trace against a daemon, as real engines with real bytes.

    Uses namespaces of its own; its blocks compete with all others for memory.
    Blocks that a lookup misses are stored. Exit code 1 if wrong bytes come back.
    """
    from kvhearth_lab.replay import Replayed
    from kvhearth_lab.replay import replay as run
    from kvhearth_server.traces.format import read_trace

    try:
        block = parse_size(page_bytes) if page_bytes else 0
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--page-bytes: {error}") from None
    trace = read_trace(file)
    if not len(trace):
        raise KVHearthError(Reason.CONFIG_INVALID, f"{file} is empty; record for longer")
    target = url or f"kvhearth+unix://{directory(socket_dir)}?{_DEADLINES}"
    with cleaned_up(), progress() as told:

        def noted(done: float, found: Replayed) -> None:
            rate = found.lookups / max(found.seconds, 1e-9)
            told(f"hits {percent(found.hit_keys, found.asked_keys)}, {rate:.0f} lookups/s", done)

        found = run(trace, target, speed=speed, page_bytes=block, note=noted)
    if as_json:
        say_json({**asdict(found), "hit_ratio": round(found.hit_ratio, 4)})
    else:
        rate = round(found.bytes / max(found.seconds, 1e-9))
        typer.echo(
            f"{found.lookups} lookups of {found.asked_keys} keys in {found.seconds:.1f} s: "
            f"{percent(found.hit_keys, found.asked_keys)} hits, {found.stored_keys} blocks stored, "
            f"{size(rate)}/s, {found.wrong_blocks} blocks wrong"
        )
        for reason, count in sorted(found.reasons.items()):
            note(f"{reason}: {count} transfers")
    if found.wrong_blocks:
        raise typer.Exit(EXIT_WRONG)
