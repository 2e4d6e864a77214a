"""Verbs that change a daemon: ``drain``, ``evict`` and ``forget``."""

from __future__ import annotations

import enum
import sys
import time
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.admin_client import daemon_at
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    note,
    plain,
    printable,
    say_json,
    short,
    size,
    waiting,
)
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.engine.snapshot import Stats
from kvhearth_server.transport import reports

Prefix = Annotated[
    str, typer.Argument(help="First hex digits of the namespace.", metavar="NAMESPACE")
]
DRAIN_EPILOG = "Example: kvhearth drain --wait 60 && systemctl restart kvhearth"
_PAUSE_S = 0.2


def drain(
    socket_dir: SocketDir = None,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            help="Wait up to this long until no lease or reservation is held.",
            metavar="SECONDS",
            min=0,
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Make the daemon refuse new stores and sessions, as before a shutdown;
    reads continue.

    Only a restart undoes it. With --wait it exits with 1 if sessions still hold
    something when the time is over.
    """
    end = time.monotonic() + wait_s
    daemon = daemon_at(socket_dir)
    with waiting("draining"):
        daemon.drain()
        found = daemon.stats()
        while _held(found) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
            found = daemon.stats()
    reserved = sum(part.reserved_bytes for part in found.segments)
    if as_json:
        counts = {"sessions": found.sessions, "leases": found.leases, "reserved_bytes": reserved}
        say_json({"boot_id": found.boot_id, "draining": found.draining, **counts})
    else:
        typer.echo(
            f"draining: {found.sessions} sessions, {found.leases} leases and {reserved} reserved "
            "bytes are left"
        )
    if wait_s and _held(found):
        note(f"kvhearth: error: not quiet after {wait_s:g} s")
        raise typer.Exit(1)


def _held(found: Stats) -> bool:
    return bool(found.leases or sum(part.reserved_bytes for part in found.segments))


EVICT_EPILOG = "Example: kvhearth evict 3f9c --keep 10GiB; kvhearth evict 3f9c --keep 0 --tier ssd"


class Tier(enum.StrEnum):
    """Tiers from which blocks are removed."""

    MEMORY = "memory"
    SSD = "ssd"
    ALL = "all"


def evict(
    namespace: Prefix,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            help="Evict until at most this much is left; 0 evicts everything.",
            metavar="SIZE",
        ),
    ],
    tier: Annotated[
        Tier | None,
        typer.Option(
            "--tier",
            help="Tier to evict from; ssd and all need --keep 0. Default: all with --keep 0, else "
            "memory.",
            show_default=False,
        ),
    ] = None,
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove a namespace's blocks, coldest first, until it has at most --keep.

    Leased and pinned blocks stay. --keep 0 also removes the copies on SSD; they
    do not come back after a restart. With --tier memory these copies stay and
    are served.
    """
    try:
        keep_bytes = parse_size(keep)
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--keep: {keep!r}: {error}") from None
    if keep_bytes and tier not in (None, Tier.MEMORY):
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"--tier {tier}: the SSD tier keeps all of a namespace or nothing; add --keep 0",
        )
    daemon = daemon_at(socket_dir)
    with waiting("evicting"):
        space = daemon.namespace(namespace)
        reply = daemon.evict(space.namespace, keep_bytes, tier)
    if as_json:
        say_json(plain(reply) | {"namespace": space.namespace})
        return
    message = f"{reply.evicted_blocks} blocks of {short(space.namespace)} are removed"
    more = f" from memory, {reply.ssd_blocks} from SSD" if reply.ssd_blocks else ""
    typer.echo(message + more)


FORGET_EPILOG = "Example: kvhearth forget 3f9c; kvhearth forget 3f9c --yes --json | jq .epoch"


def forget(
    namespace: Prefix,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            help="Name of the new weights, such as a training step, by which hosts "
            "share blocks at remotes. Default: the namespace is off the remotes.",
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """Make all blocks of a namespace invalid at once, in memory and on SSD,
    because its weights changed.

    Raises the namespace's weights epoch, as an engine with new weights does.
    Engines with the old weights find no block until they attach again. This
    cannot be undone. Old blocks are evicted as their memory is needed.
    """
    daemon = daemon_at(socket_dir)
    space = daemon.namespace(namespace)
    if not yes:
        _ask(space)
    reply = daemon.forget(space.namespace, space.epoch, label)
    if as_json:
        say_json(plain(reply) | {"namespace": space.namespace})
    else:
        typer.echo(f"{short(space.namespace)} is forgotten: its weights epoch is {reply.epoch} now")


def _ask(space: reports.Namespace) -> None:
    """Ask the operator to confirm.

    Raises:
        KVHearthError: ``config_invalid`` if there is no terminal to ask on.
        typer.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise KVHearthError(Reason.CONFIG_INVALID, "forget asks on a terminal; add --yes")
    model = printable(space.model)
    message = f"{short(space.namespace)} (tenant {space.tenant}, model {model})"
    held = f"{space.blocks} blocks, {size(space.used_bytes)} in memory"
    typer.confirm(f"forget {message} with {held} and its copies on SSD?", abort=True, err=True)
