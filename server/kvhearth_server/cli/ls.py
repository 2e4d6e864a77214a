"""``kvhearth ls``: namespaces, or one of them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    facts,
    note,
    plain,
    row,
    say_json,
    short,
    size,
    table,
)

EPILOG = "Example: kvhearth ls 3f9c --json | jq .contract"


def ls(
    namespace: Annotated[
        str, typer.Argument(help="First hex digits of a namespace.", metavar="[NAMESPACE]")
    ] = "",
    socket_dir: SocketDir = None,
    as_json: AsJson = False,
) -> None:
    """List namespaces with blocks, bytes and weights epoch; or show one with
    its contract.
    """
    with AdminClient(socket_dir) as daemon:
        if namespace:
            _show_one(daemon.namespace(namespace), as_json=as_json)
            return
        reply = daemon.namespaces()
    if as_json:
        spaces = [_object(space) for space in reply.namespaces]
        say_json({"boot_id": reply.boot_id, "namespaces": spaces})
        return
    if not reply.namespaces:
        note("there is no namespace yet: no engine has attached")
        return
    heads = ("namespace", "tenant", "model", "kv", "blocks", "bytes", "quota", "epoch")
    shown = table(*heads, right=heads[4:])
    for space in reply.namespaces:
        contract = json.loads(space.contract_json)
        quota = size(space.quota_bytes) if space.quota_bytes else "-"
        counts = (str(space.blocks), size(space.bytes), quota, str(space.epoch))
        names = (short(space.namespace), space.tenant, contract["model"], contract["kv_dtype"])
        row(shown, *names, *counts)
    console().print(shown)


def _show_one(space: admin_pb2.NamespaceInfo, *, as_json: bool) -> None:
    if as_json:
        say_json(_object(space))
        return
    contract = json.loads(space.contract_json)
    groups = contract.pop("groups")
    rows: list[tuple[str, object]] = [
        ("namespace", space.namespace),
        ("tenant", space.tenant),
        ("blocks", space.blocks),
        ("bytes", size(space.bytes)),
        ("quota", size(space.quota_bytes) if space.quota_bytes else "-"),
        ("epoch", space.epoch),
        *((f"contract.{name}", value) for name, value in sorted(contract.items())),
    ]
    for index, group in enumerate(groups):
        words = " ".join(f"{name}={value}" for name, value in sorted(group.items()))
        rows.append((f"contract.groups[{index}]", words))
    console().print(facts(rows))


def _object(space: admin_pb2.NamespaceInfo) -> dict[str, Any]:
    """Return the message with its contract as an object instead of a text."""
    found: dict[str, Any] = plain(space)
    found["contract"] = json.loads(found.pop("contract_json"))
    return found
