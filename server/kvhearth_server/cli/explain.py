"""``kvhearth explain``: the reason of a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    plain,
    row,
    say_json,
    short,
    size,
    table,
)

EPILOG = (
    "Example: kvhearth explain contract.json; kvhearth explain 9f86d081884c7d659a2feaa0c55ad015"
)


def explain(
    what: Annotated[
        str, typer.Argument(help="File with a contract as JSON, or a key in hex.", metavar="WHAT")
    ],
    socket_dir: SocketDir = None,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the contract. Default: the first tenant.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Explain why a lookup misses.

    For a contract: prints its namespace, or the nearest namespaces and the
    fields that differ, and which share of the tenant is used up. For a key:
    prints each copy, its state, and why it is not served. Exits with 1 if the
    key is absent.
    """
    path = Path(what)
    if path.is_file():
        _contract(path, socket_dir, tenant, as_json=as_json)
        return
    try:
        key = bytes.fromhex(what)
    except ValueError:
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"{what!r} is neither a file nor a key in hex"
        ) from None
    _key(key, socket_dir, as_json=as_json)


def _contract(path: Path, socket_dir: Path | None, tenant: str, *, as_json: bool) -> None:
    try:
        text = Contract.from_json(path.read_text(encoding="utf-8")).to_json()
    except (OSError, UnicodeDecodeError, KVHearthError) as error:
        message = error.message if isinstance(error, KVHearthError) else str(error)
        raise KVHearthError(Reason.CONFIG_INVALID, f"{path}: {message}") from None
    with AdminClient(socket_dir) as daemon:
        reply = daemon.explain_contract(tenant, text)
    if as_json:
        say_json({"kind": "contract", **plain(reply)})
        return
    for refusal in _refusals(reply, text):
        typer.echo(refusal)
    if reply.exists:
        typer.echo(f"the namespace {reply.namespace} exists: the contract is no reason for a miss")
        return
    typer.echo(
        f"there is no namespace {reply.namespace}: no engine has attached with this contract"
    )
    for near in reply.nearest:
        shown = table("field", "asked", "there is")
        for field in near.fields:
            row(shown, field.field, field.asked, field.stored)
        title = f"\nnamespace {short(near.namespace)} differs in {len(near.fields)}:"
        console().print(Group(title, shown))


def _refusals(reply: admin_pb2.ExplainContractResponse, text: str) -> list[str]:
    """Return why the tenant's shares would refuse an attach with the contract, one line each."""
    needs = {"sessions": 1}
    if not reply.exists:
        needs |= {"namespaces": 1, "contract_bytes": len(text)}
    return [
        f"attaching would be refused: tenant {part.tenant} uses {part.used} {part.share} and has "
        f"room for {part.room} (floor {part.floor}, cap {part.cap}); see tenant_shares"
        for part in reply.shares
        if part.room < needs.get(part.share, 0)
    ]


def _key(key: bytes, socket_dir: Path | None, *, as_json: bool) -> None:
    with AdminClient(socket_dir) as daemon:
        reply = daemon.explain_key(key)
    if as_json:
        say_json({"kind": "key", "key": key.hex(), **plain(reply)})
    elif not reply.places:
        typer.echo(
            f"the key {key.hex()} is absent: never stored, evicted, or stored with another hash"
        )
    else:
        for place in reply.places:
            console().print(_message(place))
    if not reply.places:
        raise typer.Exit(1)


def _message(place: admin_pb2.KeyPlace) -> str:
    verdict = f"not served: {place.why_not}" if place.why_not else "served"
    current = "current" if place.epoch == place.namespace_epoch else "stale"
    held = f"{place.leases} leases, {place.pins} pins"
    bytes_told = f"{place.shards} x {size(place.shard_bytes)}"
    return (
        f"namespace {short(place.namespace)} (tenant {place.tenant}), group {place.group}: "
        f"{verdict}\n  {place.state} in {place.tier}, epoch {place.epoch} ({current}), "
        f"{bytes_told}, {held}"
    )
