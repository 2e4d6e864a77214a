"""``kvhearth evict``."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import AsJson, SocketDir, plain, say_json, short, waiting
from kvhearth_server.config.value_types import parse_size

EPILOG = "Example: kvhearth evict 3f9c --keep 10GiB; kvhearth evict 3f9c --keep 0 --tier ssd"


class Tier(enum.StrEnum):
    """Tiers from which blocks are removed."""

    MEMORY = "memory"
    SSD = "ssd"
    ALL = "all"


def evict(
    namespace: Annotated[
        str, typer.Argument(help="First hex digits of the namespace.", metavar="NAMESPACE")
    ],
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
    where = admin_pb2.EvictTier.Value(f"EVICT_TIER_{tier.upper() if tier else 'UNSPECIFIED'}")
    with AdminClient(socket_dir) as daemon, waiting("evicting"):
        space = daemon.namespace(namespace)
        reply = daemon.evict(space.namespace, keep_bytes, where)
    if as_json:
        say_json(plain(reply) | {"namespace": space.namespace})
        return
    message = f"{reply.evicted_blocks} blocks of {short(space.namespace)} are removed"
    more = f" from memory, {reply.ssd_blocks} from SSD" if reply.ssd_blocks else ""
    typer.echo(message + more)
