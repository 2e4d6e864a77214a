"""``kvhearth evict``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.options import AsJson, SocketDir
from kvhearth_server.cli.output import plain, say_json, short, waiting
from kvhearth_server.cli.reach import Reach
from kvhearth_server.units import parse_size

EPILOG = "Example: kvhearth evict 3f9c --keep 10GiB"


def evict(
    namespace: Annotated[str, typer.Argument(help="First hex digits of it.", metavar="NAMESPACE")],
    keep: Annotated[
        str, typer.Option("--keep", help="What it may keep; 0 removes all.", metavar="SIZE")
    ],
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove a namespace's blocks, coldest first, until it has at most --keep.

    Blocks that are leased or pinned stay.
    """
    try:
        keep_bytes = parse_size(keep)
    except ValueError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--keep: {keep!r}: {error}") from None
    with Reach(socket_dir) as daemon, waiting("evicting"):
        space = daemon.namespace(namespace)
        reply = daemon.evict(space.namespace, keep_bytes)
    if as_json:
        say_json(plain(reply) | {"namespace": space.namespace})
    else:
        typer.echo(f"{reply.evicted_blocks} blocks of {short(space.namespace)} are removed")
