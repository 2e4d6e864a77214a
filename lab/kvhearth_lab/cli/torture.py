"""``kvhearth torture``: fault injection on this machine, with daemons of its own."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvhearth_lab.cli import cleaned_up
from kvhearth_server.cli.output import AsJson, console, note, row, say_json, table

if TYPE_CHECKING:
    from kvhearth_lab.torture.run import Progress as Told

EPILOG = "Example: kvhearth torture --seconds 600 --dir /mnt/nvme --json | tail -n 1 | jq .passed"
EXIT_FOUND = 1
EXIT_UNTESTED = 2
_SECONDS = 60.0
_TEXT_CHARS_MAX = 2000


_SHARED_MEMORY = Path("/dev/shm")

Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Random seed (default: random).", show_default=False),
]
Seconds = Annotated[
    float,
    typer.Option(
        "--seconds",
        min=1,
        help="Duration. A fault in progress is finished first. Use at least 10 s: shorter runs "
        "test nothing on most machines.",
    ),
]
Faults = Annotated[
    str, typer.Option("--faults", help="Faults to inject, separated by commas; 'list' lists them.")
]
Ssd = Annotated[
    bool, typer.Option("--ssd/--no-ssd", help="Use worlds with or without an SSD tier.")
]
Gateway = Annotated[
    bool | None,
    typer.Option(
        "--gateway/--no-gateway",
        help="Use worlds with or without remote clients (default: some have them).",
        show_default=False,
    ),
]
Remote = Annotated[
    bool | None,
    typer.Option(
        "--remote/--no-remote",
        help="Use worlds with or without a remote behind memory (default: some have one, where its "
        "library is installed). weed and valkey-server are used if PATH has them, else a "
        "directory.",
        show_default=False,
    ),
]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Directory on the drive to test (default: the temporary directory).",
        metavar="DIR",
    ),
]
ArenaRoot = Annotated[
    Path, typer.Option("--arena-root", help="Directory on a tmpfs for arenas.", metavar="DIR")
]
OneWorld = Annotated[
    int | None,
    typer.Option("--world", min=0, help="Run only this world of the seed.", show_default=False),
]
Log = Annotated[
    Path | None,
    typer.Option(
        "--log",
        help="Write each step to a file, as JSON lines.",
        metavar="FILE",
        show_default=False,
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        help="Replay the steps of a log written with --log.",
        metavar="FILE",
        show_default=False,
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the directories of worlds with findings.")]


def torture(  # noqa: PLR0913 - one parameter a flag
    *,
    seed: Seed = None,
    seconds: Seconds = _SECONDS,
    faults: Faults = "",
    ssd: Ssd = True,
    gateway: Gateway = None,
    remote: Remote = None,
    directory: Dir = None,
    arena_root: ArenaRoot = _SHARED_MEMORY,
    world: OneWorld = None,
    log: Log = None,
    replay: Replay = None,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Inject faults, compare every answer, and report lost or wrong blocks,
    leaks and stalls.

    Starts its own daemons. Exit code 1 for findings that docs/operations.md
    does not allow, 2 if nothing was tested.
    """
    from kvhearth_lab.torture.faults import TABLE
    from kvhearth_lab.torture.report import KINDS
    from kvhearth_lab.torture.run import Options, run
    from kvhearth_lab.torture.scene import Roots

    if faults == "list":
        _list(TABLE)
        return
    chosen = seed if seed is not None else secrets.randbelow(1 << 32)
    options = Options(
        seed=chosen,
        seconds=seconds,
        roots=Roots(arena_root, directory or Path(tempfile.gettempdir())),
        faults=tuple(word.strip() for word in faults.split(",") if word.strip()),
        ssd=ssd,
        gateway=gateway,
        remote=remote,
        first=world or 0,
        worlds=0 if world is None else 1,
        log=log,
        replay=replay,
        keep=keep,
    )
    with cleaned_up(), _bar(seconds) as described:
        found = run(options, described)
    for line in found["findings"]:
        note(f"world {line['world']} step {line['step']}: {line['kind']}: {_cut(line['text'])}")
    if as_json:
        say_json(found)
    else:
        console().print(shown(found))
    if found["passed"]:
        return
    if not any(found[kind] for kind in KINDS):
        note("nothing was tested: give it more seconds")
        raise typer.Exit(EXIT_UNTESTED)
    note(f"repeat with: kvhearth torture --seed {chosen} --seconds {seconds:g}")
    raise typer.Exit(EXIT_FOUND)


def shown(found: Mapping[str, Any]) -> Table:
    """Return a table of the faults, then the findings that must be zero, then the rest."""
    from kvhearth_lab.torture.faults import TABLE
    from kvhearth_lab.torture.report import KINDS, STALL_S

    made = table("what", "count", "ok", "", right=("count",))
    for name, count in found["faults_by_name"].items():
        row(made, name, f"{count:,}", "", TABLE[name].help)
    for name in ("worlds", "steps", "operations", "compared_blocks"):
        row(made, name, f"{found[name]:,}", "", "")
    for kind in KINDS:
        row(made, kind, f"{found[kind]:,}", "NO" if found[kind] else "yes", "must be 0")
    stall = found["longest_stall_s"]
    described = f"{found['longest_stall']}, less what faults explain; at most {STALL_S:g} s"
    row(made, "longest_stall_s", f"{stall:g}", "NO" if stall > STALL_S else "yes", described)
    row(made, "longest_promotion_s", f"{found['longest_promotion_s']:g}", "", "16 blocks at a time")
    for what, cells in _covered(found):
        row(made, what, *cells)
    for why, count in found["excused_blocks"].items():
        row(made, f"excused: {why}", f"{count:,}", "", "may be gone, by docs/operations.md")
    row(made, "seed", str(found["seed"]), "", f"{found['seconds']:g} s")
    return made


def _covered(found: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield rows of the coverage; marks that no world of the run could hit have none."""
    missing = {
        "points": found["points_missing"],
        "client_points": found["client_points_missing"],
        "mover_points": found["mover_points_missing"],
        "boundaries": [
            f"{sectors} sectors: {', '.join(map(str, missed))}"
            for sectors, missed in found["boundaries_missing"].items()
        ],
    }
    for what, names in missing.items():
        reached, total = found[f"{what}_reached"], found[f"{what}_total"]
        described = f"not reached: {'; '.join(names)}" if names else "each was reached"
        if total:
            yield f"{what}_reached", (f"{reached}/{total}", "", _cut(described))


def _list(faults: Mapping[str, Any]) -> None:
    made = table("fault", "what it does")
    for name, fault in faults.items():
        row(made, name, fault.help)
    console().print(made)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS_MAX else text[:_TEXT_CHARS_MAX] + " ..."


@contextlib.contextmanager
def _bar(seconds: float) -> Iterator[Told]:
    """Show a progress bar on stderr, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("torture", total=seconds)
        yield lambda done, text: bar.update(task, completed=min(done, seconds), description=text)
