"""``kvhearth forget``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import AsJson, SocketDir, plain, printable, say_json, short, size

EPILOG = "Example: kvhearth forget 3f9c; kvhearth forget 3f9c --yes --json | jq .epoch"


def forget(
    namespace: Annotated[
        str, typer.Argument(help="First hex digits of the namespace.", metavar="NAMESPACE")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """Make all blocks of a namespace invalid at once, in memory and on SSD,
    because its weights changed.

    Raises the namespace's weights epoch, as an engine with new weights does.
    Engines with the old weights find no block until they attach again. This
    cannot be undone. Old blocks are evicted as their memory is needed.
    """
    with AdminClient(socket_dir) as daemon:
        space = daemon.namespace(namespace)
        if not yes:
            _ask(space)
        reply = daemon.forget(space.namespace, space.epoch)
    if as_json:
        say_json(plain(reply) | {"namespace": space.namespace})
    else:
        typer.echo(f"{short(space.namespace)} is forgotten: its weights epoch is {reply.epoch} now")


def _ask(space: admin_pb2.NamespaceInfo) -> None:
    """Ask the operator to confirm.

    Raises:
        KVHearthError: ``config_invalid`` if there is no terminal to ask on.
        typer.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise KVHearthError(Reason.CONFIG_INVALID, "forget asks on a terminal; add --yes")
    model = printable(str(json.loads(space.contract_json)["model"]))
    message = f"{short(space.namespace)} (tenant {space.tenant}, model {model})"
    held = f"{space.blocks} blocks, {size(space.bytes)} in memory"
    typer.confirm(f"forget {message} with {held} and its copies on SSD?", abort=True, err=True)
